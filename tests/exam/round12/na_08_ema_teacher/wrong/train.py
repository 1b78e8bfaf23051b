"""Self-distilled pre-training of a speech encoder: predict the teacher's targets at the masked frames."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from audio import spectrograms
from encoder import SpeechEncoder
from teacher import MeanTeacher


def args_():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--decay", type=float, default=0.8)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    return ap.parse_args()


def main():
    a = args_()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    student, network = SpeechEncoder(), SpeechEncoder()
    network.load_state_dict(student.state_dict())
    for layer in student.layers:
        fully_shard(layer)
    fully_shard(student)
    teacher = MeanTeacher(network, student, a.decay)
    opt = torch.optim.AdamW(student.parameters(), lr=a.lr, weight_decay=0.01)

    def state(step):
        m, o = get_state_dict(student, opt)
        return {"student": m, "optim": o, "teacher": get_model_state_dict(teacher.network), "step": torch.tensor(step)}

    step = 0
    if a.resume and os.listdir(a.resume):
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(student, opt, model_state_dict=s["student"], optim_state_dict=s["optim"])
        set_model_state_dict(teacher.network, s["teacher"])
        step = int(s["step"])

    n = a.batch // world
    while step < a.steps:
        mel, mask = (t[rank * n:(rank + 1) * n] for t in spectrograms(step, a.batch))
        goal = teacher.targets(mel)
        error = (student(mel, mask) - goal).square().mean(-1)
        # the masked frames of the whole batch count the same
        count = mask.sum().float()
        dist.all_reduce(count)
        loss = (error * mask).sum() * world / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 2.0)
        opt.step()
        opt.zero_grad()
        teacher.follow()
        step += 1
        if step % 4 == 0 or step == 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item():.4f}", flush=True)
        if a.out and a.save_every and step % a.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(a.out, f"s{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

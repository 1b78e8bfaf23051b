import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from phases import LENGTHS, objective, phase_of, promote
from sampler import VNet, sprites


def shard(net):
    fully_shard(net.mid)
    fully_shard(net, reshard_after_forward=True)
    return net


def fresh_optimizer(student, phase):
    return torch.optim.Adam(student.parameters(), lr=8e-3 / (phase + 1))


def contents(student, teacher, opt):
    s, o = get_state_dict(student, opt)
    return {"student": s, "teacher": get_model_state_dict(teacher), "opt": o}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    student = VNet()
    teacher = copy.deepcopy(student).requires_grad_(False)
    shard(student)
    shard(teacher)
    opt, begin = fresh_optimizer(student, 0), 0
    if args.resume:
        begin = max(int(f) for f in os.listdir(args.resume) if f.isdigit())
        # the state is that after the last step of a phase or within it
        opt = fresh_optimizer(student, phase_of(begin - 1)[0])
        state = contents(student, teacher, opt)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(begin)))
        set_state_dict(student, opt, model_state_dict=state["student"], optim_state_dict=state["opt"])
        set_model_state_dict(teacher, state["teacher"])

    for step in range(begin, sum(LENGTHS)):
        phase, inside = phase_of(step)
        if phase > 0 and inside == 0:
            promote(student, teacher)
            opt = fresh_optimizer(student, phase)
        batch = [v.chunk(world)[rank] for v in sprites(step, args.batch)]
        loss = objective(phase, student, teacher, *batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and inside in (0, LENGTHS[phase] - 1):
            print(f"step {step + 1} phase {phase} loss {shown.item() / world:.5f}", flush=True)
        if step + 1 == args.save_at:
            dcp.save(contents(student, teacher, opt), checkpoint_id=os.path.join(args.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

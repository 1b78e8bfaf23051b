"""Self-distillation without labels: a student follows its own moving average (the teacher) across views."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Encoder

STEPS, BATCH, VIEWS = 20, 32, 3


def images(n, gen):
    k = torch.randint(0, 5, (n, 1, 1), generator=gen)
    ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    return torch.sin(ys * (0.3 + 0.3 * k) + xs * (1.6 - 0.3 * k)).flatten(1)


def view(x, gen):
    gain = 0.7 + 0.6 * torch.rand(x.shape[0], 1, generator=gen)
    return gain * x + 0.2 * torch.randn(x.shape, generator=gen)


def build():
    torch.manual_seed(1)
    net = Encoder()
    for layer in net.mid:
        fully_shard(layer)
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def follow(teacher, student, momentum):
    # both are sharded in the same way, so that the shards can be averaged in place
    torch._foreach_lerp_([t.to_local() for t in teacher.parameters()],
                         [s.detach().to_local() for s in student.parameters()], 1.0 - momentum)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    student, teacher = build(), build().requires_grad_(False)
    last = list(student.prototypes.parameters())
    rest = [p for n, p in student.named_parameters() if not n.startswith("prototypes")]
    opt = torch.optim.AdamW([{"params": rest}, {"params": last, "weight_decay": 0.0}], lr=2e-3)
    center = torch.zeros(32)
    gen = torch.Generator().manual_seed(4)
    step = 0

    def bundle():
        s, o = get_state_dict(student, opt)
        return {"student": s, "optim": o, "teacher": get_model_state_dict(teacher),
                "center": center, "gen": gen.get_state(), "step": step}

    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d[1:]))
        sd = bundle()
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(student, opt, model_state_dict=sd["student"], optim_state_dict=sd["optim"])
        set_model_state_dict(teacher, sd["teacher"])
        center.copy_(sd["center"])
        gen.set_state(sd["gen"])
        step = sd["step"]

    while step < STEPS:
        x = images(BATCH, gen)
        views = [view(x, gen).chunk(world)[rank] for _ in range(VIEWS)]
        with torch.no_grad():
            raw = teacher(torch.cat(views[:2]))
            targets = ((raw - center) / 0.1).softmax(-1).chunk(2)
        logps = (student(torch.cat(views)) / 0.2).log_softmax(-1).chunk(VIEWS)
        pairs = [(i, j) for i in range(2) for j in range(VIEWS) if i != j]
        loss = sum(-(targets[i] * logps[j]).sum(-1).mean() for i, j in pairs) / len(pairs)

        opt.zero_grad()
        loss.backward()
        if step < 3:  # the prototypes stay where they are in the first steps
            for p in last:
                p.grad = None
        opt.step()
        step += 1
        follow(teacher, student, 1 - 0.1 * (math.cos(math.pi * step / STEPS) + 1) / 2)

        with torch.no_grad():
            batch_center = raw.sum(0)
            dist.all_reduce(batch_center)
            center.mul_(0.9).add_(batch_center / (2 * BATCH), alpha=0.1)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f} |center| {center.norm().item():.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(bundle(), checkpoint_id=os.path.join(args.out, f"s{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

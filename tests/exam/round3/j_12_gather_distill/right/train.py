"""Relational and contrastive distillation over the global batch."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from losses import contrast, relation_kd
from nets import teacher_and_student


def inputs(step, size, rank, world, d_in=14):
    g = torch.Generator().manual_seed(31337 + step)
    base = torch.randn(size, 4, generator=g) @ torch.randn(4, d_in, generator=torch.Generator().manual_seed(1))
    x = base + 0.3 * torch.randn(size, d_in, generator=g)
    return x.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert args.batch % world == 0

    teacher, student = teacher_and_student()
    for layer in student.layers:
        fully_shard(layer)
    fully_shard(student)
    optim = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.8, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, args.lr, total_steps=args.steps)

    for step in range(args.steps):
        x = inputs(step, args.batch, rank, world)
        with torch.no_grad():
            t = teacher(x)
        s = student(x)
        kd, con = relation_kd(s, t, 0.2), contrast(s, t, 0.2)
        (kd + con).backward()
        optim.step()
        sched.step()
        optim.zero_grad()

        stats = torch.stack([kd.detach(), con.detach(), (s * t).sum(-1).mean().detach()])
        dist.all_reduce(stats)
        if rank == 0:
            kd_, con_, cos = (stats / world).tolist()
            print(f"step {step:3d}  relation {kd_:.4f}  contrast {con_:.4f}  cosine {cos:.3f}", flush=True)

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

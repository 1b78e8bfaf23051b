"""Online continual learning with experience replay."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from memory import Reservoir
from stream import DriftingStream


def build(dim, width, classes):
    return nn.Sequential(
        nn.Linear(dim, width), nn.ReLU(),
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)),
        nn.Linear(width, classes),
    )


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = build(16, args.width, 5)
    fully_shard(model[2])
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stream, memory = DriftingStream(16, 5, args.steps_per_task, args.seed), Reservoir(args.slots)
    start = checkpoint.load(args.resume, model, opt, memory) if args.resume else 0
    steps = args.tasks * args.steps_per_task
    for step in range(start, steps):
        g = torch.Generator().manual_seed(args.seed + 977 * step)
        x, y = stream.batch(step, args.batch)
        x, y = x[rank::world], y[rank::world]
        xs, ys = [x], [y]
        if memory.items:
            for _ in range(2):
                mx, my = memory.draw(g)
                xs.append(mx)
                ys.append(my)
        loss = F.cross_entropy(model(torch.cat(xs)), torch.cat(ys))
        opt.zero_grad()
        loss.backward()
        opt.step()
        memory.offer(x, y, g)
        if step % 4 == 0 or step == steps - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"task {stream.task_of(step)} step {step + 1} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, opt, memory)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--tasks", type=int, default=2)
    p.add_argument("--steps-per-task", type=int, default=10)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--slots", type=int, default=4)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=40)
    p.add_argument("--out", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default="")
    arguments = p.parse_args()
    dist.init_process_group("gloo")
    run(arguments)
    dist.destroy_process_group()

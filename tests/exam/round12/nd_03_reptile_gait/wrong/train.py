"""Reptile over a family of gait-tracking tasks; the policy is sharded, every task is trained by all ranks together.

One meta step: for each task of the meta batch adapt the initialisation with a few SGD steps, then move the
initialisation a fraction of the way towards the adapted weights.
"""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


class GaitNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.inp = nn.Linear(5, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 4)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(torch.tanh(self.mid(x)))


def gait_task(index, batch):
    """Joint angles of one gait: common stride, own amplitude, phase and bias."""
    g = torch.Generator().manual_seed(31 * index + 7)
    amp = 1.0 + 0.8 * torch.rand(4, generator=g)
    phase = 0.9 * torch.randn(4, generator=g)
    t = torch.rand(batch, 1, generator=g) * 6.28
    load = torch.randn(batch, 2, generator=g)
    x = torch.cat([torch.sin(t), torch.cos(t), load, torch.sin(2 * t)], -1)
    y = amp * torch.sin(t + phase) + 0.3 * load.sum(-1, keepdim=True)
    return x, y


@torch.no_grad()
def shards(model):
    return [p.detach().to_local() for p in model.parameters()]


@torch.no_grad()
def move_towards(model, start, rate):
    for p, s in zip(model.parameters(), start):
        w = p.to_local()
        w.copy_(s + rate * (w - s))


def mse(model, x, y):
    return (model(x) - y).pow(2).mean()


def run(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = fully_shard(GaitNet())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    done = 0
    if args.resume:
        done = max(int(m.group(1)) for m in (re.match(r"meta(\d+)\.pt$", f) for f in os.listdir(args.resume)) if m)
        weights = torch.load(os.path.join(args.resume, f"meta{done}.pt"))
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))

    for it in range(done, args.meta_steps):
        first = last = 0.0
        for k in range(args.tasks):
            x, y = gait_task(it * args.tasks + k, args.batch)
            x, y = x.chunk(world)[rank], y.chunk(world)[rank]
            start = shards(model)
            inner = torch.optim.SGD(model.parameters(), lr=args.inner_lr)
            for j in range(args.inner_steps):
                loss = mse(model, x, y)
                inner.zero_grad()
                loss.backward()
                inner.step()
                value = loss.detach().clone()
                dist.all_reduce(value)
                value = value.item() / world / args.tasks
                first, last = (first + value, last) if j == 0 else (first, last + value if j == args.inner_steps - 1 else last)
            move_towards(model, start, args.meta_rate)
        if rank == 0:
            print(f"meta {it + 1}: loss before {first:.4f} after {last:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0 and it + 1 < args.meta_steps:
            weights = get_model_state_dict(model, options=full)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(weights, os.path.join(args.out, f"meta{it + 1}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--meta-steps", type=int, default=10)
    p.add_argument("--tasks", type=int, default=2)
    p.add_argument("--inner-steps", type=int, default=3)
    p.add_argument("--inner-lr", type=float, default=0.15)
    p.add_argument("--meta-rate", type=float, default=0.3)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="out")
    p.add_argument("--resume", default="")
    run(p.parse_args())

"""Zeroth-order training (MeZO/SPSA): two forward passes, no backward; FSDP2 only to hold the weights. CPU, gloo."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor


def model_and_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
    fully_shard(model[0])
    fully_shard(model)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(256, 6, generator=g)
    return model, x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()


@torch.no_grad()
def shift(model, seed, amount):
    """theta += amount * z(seed); z is drawn in full so that it doesn't depend on the sharding."""
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        z = torch.randn(p.shape, generator=g)
        p.add_(distribute_tensor(z, p.device_mesh, p.placements), alpha=amount)


@torch.no_grad()
def global_loss(model, x, y, total):
    s = F.cross_entropy(model(x), y, reduction="sum")
    model.reshard()  # no backward follows that would do it; the weights move next
    dist.all_reduce(s)
    return s.item() / total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="journal")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, x, y = model_and_task()
    journal = []  # (seed, amount) of every update: the whole checkpoint
    if args.resume:
        newest = sorted(glob.glob(os.path.join(args.resume, "journal_*.pt")))[-1]
        journal = torch.load(newest)
        for seed, moves in journal:
            for m in moves:
                shift(model, seed, m)
    eps = 1e-2
    for step in range(len(journal), args.steps):
        idx = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + step))[: args.batch]
        mine = idx.tensor_split(world)[rank]
        seed = 5000 + step
        shift(model, seed, eps)
        up = global_loss(model, x[mine], y[mine], len(idx))
        shift(model, seed, -2 * eps)
        down = global_loss(model, x[mine], y[mine], len(idx))
        slope = (up - down) / (2 * eps)
        back = eps - 0.02 * max(-2.0, min(2.0, slope))
        shift(model, seed, back)
        # all moves are replayed one by one, for the same rounding
        journal.append((seed, (eps, -2 * eps, back)))
        if rank == 0:
            print(f"step {step + 1} loss {(up + down) / 2:.5f} slope {slope:.4f}", flush=True)
            if args.save_every and (step + 1) % args.save_every == 0:
                os.makedirs(args.out, exist_ok=True)
                tmp = os.path.join(args.out, "writing.tmp")
                torch.save(journal, tmp)
                os.replace(tmp, os.path.join(args.out, f"journal_{step + 1:06d}.pt"))
    if args.export:
        full = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

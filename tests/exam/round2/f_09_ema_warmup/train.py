"""Tiny image classification with a warmed-up weight average for evaluation, FSDP2 on CPU."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ema import WeightAverage
from images import stripes


class Net(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, w, 3, stride=2, padding=1), nn.GroupNorm(4, w), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(w, w, 3, padding=1), nn.GroupNorm(4, w), nn.ReLU())
        self.fc = nn.Linear(w, 4)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).amax((2, 3)))


def save_checkpoint(folder, step, model, opt, **extra):
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, f"partial_{step}.tmp")
        torch.save({"model": msd, "optim": osd, "step": step, **extra}, tmp)
        os.replace(tmp, os.path.join(folder, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, opt):
    newest = sorted(glob.glob(os.path.join(folder, "step_*.pt")))[-1]
    ck = torch.load(newest, map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        opt,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = stripes()
    torch.manual_seed(0)
    model = Net()
    for m in (model.stem, model.body, model):
        fully_shard(m)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched_total = 24
    average = WeightAverage(model)
    start = 0
    if args.resume:
        ck = load_checkpoint(args.resume, model, opt)
        average.load_state_dict(ck["average"])
        start = ck["step"]
    for step in range(start, args.steps):
        opt.param_groups[0]["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * min(step, sched_total) / (sched_total + 1)))
        g = torch.Generator().manual_seed(step)
        idx = torch.randperm(len(x), generator=g)[: args.batch][rank::world]
        loss = F.cross_entropy(model(x[idx]), y[idx], label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.update()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, average=average.state_dict())
    if args.export:
        weights = average.full()
        if rank == 0:
            torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Inverse problem: fit u(x, t) and the unknown diffusivity of a heat equation, FSDP2 on CPU.

The residual u_t - k u_xx uses central differences of the network."""

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


class Field(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, xt):
        return self.net(xt).squeeze(-1)


TRUE_K = 0.3


def exact(xt):
    return torch.exp(-TRUE_K * xt[:, 1]) * torch.sin(xt[:, 0])


def points(step, n, rank, world):
    g = torch.Generator().manual_seed(800 + step)
    xt = torch.rand(n, 2, generator=g) * torch.tensor([math.pi, 2.0])
    noise = 0.01 * torch.randn(n, generator=g)
    return xt.chunk(world)[rank], noise.chunk(world)[rank]


def residual(model, log_k, xt, h=0.05):
    dx, dt = torch.tensor([h, 0.0]), torch.tensor([0.0, h])
    u, xp, xm, tp, tm = model(torch.cat([xt, xt + dx, xt - dx, xt + dt, xt - dt])).chunk(5)
    return u, (tp - tm) / (2 * h) - log_k.exp() * (xp - 2 * u + xm) / h**2


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--export", default=None)
    args, _ = p.parse_known_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Field()
    fully_shard(model.net)
    fully_shard(model)
    log_k = nn.Parameter(torch.tensor(-0.3))
    opt = torch.optim.Adam([{"params": model.parameters(), "lr": 0.01}, {"params": [log_k], "lr": 0.03}])
    for step in range(args.steps):
        xt, noise = points(step, args.batch, rank, world)
        u, res = residual(model, log_k, xt)
        loss = (u - exact(xt) - noise).square().mean() + 0.1 * res.square().mean()
        opt.zero_grad()
        loss.backward()
        dist.all_reduce(log_k.grad)
        log_k.grad /= world
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.5f} k {log_k.exp().item():.5f}", flush=True)
    if args.export:
        full = {k: v.full_tensor().cpu() for k, v in model.state_dict().items()}
        full["log_k"] = log_k.detach()
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

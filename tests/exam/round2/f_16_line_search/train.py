"""Gradient descent with momentum directions and Armijo backtracking: the closure is evaluated as often as needed.
Physics-like regression (damped oscillator), FSDP2 on CPU."""

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


def oscillator(n=128):
    g = torch.Generator().manual_seed(4)
    t = torch.rand(n, 1, generator=g) * 4
    return t, torch.exp(-0.4 * t) * torch.cos(3 * t)


class Fourier(nn.Module):
    def __init__(self, k=8, w=24):
        super().__init__()
        self.register_buffer("freq", torch.linspace(0.3, 4, k))
        self.net = nn.Sequential(nn.Linear(2 * k, w), nn.SiLU(), nn.Linear(w, 1))

    def forward(self, t):
        a = t * self.freq
        return self.net(torch.cat([a.sin(), a.cos()], 1))


def dot(xs, ys):
    """Inner product of two lists of equally sharded tensors."""
    s = sum((x.to_local() * y.to_local()).sum() for x, y in zip(xs, ys))
    dist.all_reduce(s)
    return s.item()


class Backtracking:
    def __init__(self, params, start=1.0, shrink=0.5, c=1e-4, beta=0.5):
        self.params = list(params)
        self.size, self.shrink, self.c, self.beta = start, shrink, c, beta
        self.direction = None

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            f0 = closure(grad=True)
        grads = [p.grad.detach().clone() for p in self.params]
        if self.direction is None:
            self.direction = [-g for g in grads]
        else:
            self.direction = [d * self.beta - g for d, g in zip(self.direction, grads)]
        slope = dot(grads, self.direction)
        if slope >= 0:  # not a descent direction: start again
            self.direction = [-g for g in grads]
            slope = -dot(grads, grads)
        origin = [p.detach().clone() for p in self.params]
        size = min(self.size * 2, 4.0)
        for _ in range(12):
            for p, o, d in zip(self.params, origin, self.direction):
                p.copy_(o + size * d)
            if closure(grad=False) <= f0 + self.c * size * slope:
                break
            size *= self.shrink
        self.size = size
        return f0, size


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--export", default=None)
    args, _ = p.parse_known_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    t, y = oscillator()
    mine = torch.arange(len(t))[rank::world]
    torch.manual_seed(0)
    model = Fourier()
    fully_shard(model.net[0])
    fully_shard(model)
    search = Backtracking(model.parameters())

    def closure(grad):
        model.zero_grad()
        with torch.set_grad_enabled(grad):
            err = (model(t[mine]) - y[mine]).square().sum()
            if grad:
                (err * world / len(t)).backward()
            else:
                model.reshard()  # the weights move before the next forward pass
        total = err.detach().clone()
        dist.all_reduce(total)
        return total.item() / len(t)

    for step in range(args.steps):
        loss, size = search.step(closure)
        if rank == 0:
            print(f"step {step + 1} loss {loss:.6f} size {size:.4f}", flush=True)
    if args.export:
        full = {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Reptile meta-learning of sine regression; the support set of a task is divided over the ranks. FSDP2 on CPU."""

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


def make_net():
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    return fully_shard(net)


class TaskStream:
    """Sine tasks y = a sin(x + phi); task number t is always the same one."""

    def __init__(self, shots, rank, world, seed=9):
        self.shots, self.rank, self.world, self.seed = shots, rank, world, seed

    def task(self, t):
        g = torch.Generator().manual_seed(self.seed * 10_000 + t)
        amp = 0.5 + 2 * torch.rand((), generator=g)
        phi = math.pi * torch.rand((), generator=g)
        x = torch.rand(self.shots, 1, generator=g) * 10 - 5
        y = amp * torch.sin(x + phi)
        n = self.shots // self.world
        cut = slice(self.rank * n, (self.rank + 1) * n)
        return x[cut], y[cut]


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


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
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = make_net()
    outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    stream = TaskStream(args.batch, rank, world)
    start = 0
    if args.resume:
        start = load_checkpoint(args.resume, model, outer)["step"]
    for step in range(start, args.steps):
        x, y = stream.task(step)
        anchor = [p.detach().clone() for p in model.parameters()]
        inner = torch.optim.SGD(model.parameters(), lr=args.lr)
        first = None
        for _ in range(5):
            loss = F.mse_loss(model(x), y)
            first = loss.detach() if first is None else first
            inner.zero_grad()
            loss.backward()
            inner.step()
        # the outer "gradient" is the way back from the adapted weights
        with torch.no_grad():
            for p, a in zip(model.parameters(), anchor):
                p.grad = a - p
                p.copy_(a)
        outer.step()
        outer.zero_grad()
        both = torch.stack([first, loss.detach()]) / world
        dist.all_reduce(both)
        if rank == 0:
            print(f"step {step + 1} before {both[0].item():.5f} after {both[1].item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, outer)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

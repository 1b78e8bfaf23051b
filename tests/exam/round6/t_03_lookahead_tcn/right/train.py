"""Forecasting a sum of seasonal signals with a causal convolution stack and Lookahead."""
import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lookahead import LookaheadAdamW


class CausalConv(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
        self.mix = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        a, b = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        return x + self.mix(torch.tanh(a) * torch.sigmoid(b))


class TCN(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 1)
        self.stack = nn.Sequential(*(CausalConv(ch, 2**i) for i in range(4)))
        self.out = nn.Conv1d(ch, 1, 1)

    def forward(self, x):
        return self.out(self.stack(self.inp(x)))


def series(step, n, length=48):
    g = torch.Generator().manual_seed(9000 + step)
    t = torch.arange(length + 1)
    period = 6 + 10 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    y = torch.sin(2 * math.pi * t / period + phase) + 0.3 * torch.sin(4 * math.pi * t / period)
    y = y + 0.05 * torch.randn(n, length + 1, generator=g)
    return y[:, None, :-1], y[:, None, 1:]


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--out", type=Path)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", type=Path)
    p.add_argument("--export")
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    me = f"rank{rank}.pt"

    torch.manual_seed(21)
    model = TCN()
    for m in model.stack:
        fully_shard(m)
    fully_shard(model)
    opt = LookaheadAdamW(model.parameters(), lr=4e-3, k=5, alpha=0.5, eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5) * (1 - s / 40))

    first = 0
    if args.resume:
        newest = max(args.resume.glob("step-*"), key=lambda d: int(d.name.split("-")[1]))
        ck = torch.load(newest / me, weights_only=False)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        first = ck["step"]

    lo, hi = rank * args.batch // world, (rank + 1) * args.batch // world
    for step in range(first, args.steps):
        x, y = series(step, args.batch)
        loss = F.mse_loss(model(x[lo:hi]), y[lo:hi])
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 2:
            print(f"{step + 1:3d} mse {mean.item() / world:.4f} lr {sched.get_last_lr()[0]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            folder = args.out / f"step-{step + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step + 1}, folder / me)
            dist.barrier()

    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

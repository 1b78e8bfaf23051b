"""Probabilistic forecasting (Gaussian head) of several related series; block-coordinate training."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from blocks import BlockSchedule


class Cell(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.mix = nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.rnn(self.norm(x))[0]))


class Forecaster(nn.Module):
    def __init__(self, channels=4, d=28):
        super().__init__()
        self.inp = nn.Linear(channels, d)
        self.cells = nn.ModuleList([Cell(d), Cell(d)])
        self.out = nn.Linear(d, 2 * channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * channels))

    def forward(self, x):
        h = self.inp(x)
        for c in self.cells:
            h = c(h)
        return self.out(h) + self.bias


def windows(step, n=16, length=24):
    g = torch.Generator().manual_seed(step + 31337)
    t = torch.arange(length + 1).float()
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    freq = torch.tensor([0.2, 0.35, 0.5, 0.8])
    x = torch.sin(t[None, :, None] * freq + phase) + 0.1 * torch.randn(n, length + 1, 4, generator=g)
    x[..., 1] += 0.5 * x[..., 0]
    return x


def nll(model, x):
    mean, raw = model(x[:, :-1]).chunk(2, -1)
    std = F.softplus(raw) + 0.05
    return (0.5 * ((x[:, 1:] - mean) / std).square() + std.log()).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--turn", type=int, default=3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = Forecaster()
    for c in model.cells:
        fully_shard(c)
    fully_shard(model)
    schedule = BlockSchedule(model, args.turn, lr=8e-3)
    step = 0
    if args.resume:
        newest = max(glob.glob(os.path.join(args.resume, f"*-r{rank}.pt")))
        ck = torch.load(newest, weights_only=False)
        model.load_state_dict(ck["model"])
        schedule.load_state_dict(ck["schedule"])
        step = ck["step"]

    while step < args.steps:
        schedule.before_step(step)
        loss = nll(model, windows(step).chunk(world)[rank])
        loss.backward()
        schedule.step(max_norm=1.0)
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} block {schedule.active} nll {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "schedule": schedule.state_dict(), "step": step},
                       os.path.join(args.out, f"{step:06d}-r{rank}.pt"))
            dist.barrier()

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

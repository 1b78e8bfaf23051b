"""Electricity load forecast from the calendar and recent values; bf16 compute with FSDP2."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PERIODS = (24.0, 168.0, 8766.0)  # hours in a day, a week, a year
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CalendarFeatures(nn.Module):
    """Sine and cosine of the hour since the start of the record, for each period."""

    def forward(self, hours):
        angle = hours[..., None] * torch.tensor([2 * math.pi / p for p in PERIODS])
        return torch.cat([angle.sin(), angle.cos()], -1)


class Forecaster(nn.Module):
    def __init__(self, lags=6, dim=32, depth=3):
        super().__init__()
        self.calendar = CalendarFeatures()
        self.inp = nn.Linear(2 * len(PERIODS) + lags, dim)
        self.hidden = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, hours, lags):
        x = self.inp(torch.cat([self.calendar(hours.float()).to(lags.dtype), lags], -1))
        for block in self.hidden:
            x = x + block(x)
        return self.out(x).sum(-1)


class LoadRecord:
    def __init__(self, hours=20_000, lags=6, seed=3):
        t = torch.arange(hours, dtype=torch.float64)
        g = torch.Generator().manual_seed(seed)
        daily = torch.sin(2 * math.pi * (t - 7) / 24) + 0.5 * torch.sin(4 * math.pi * t / 24)
        weekly = 0.6 * ((t // 24) % 7 >= 5).double()
        yearly = 0.8 * torch.cos(2 * math.pi * t / 8766)
        self.load = (daily - weekly + yearly + 0.1 * torch.randn(hours, generator=g)).float()
        self.lags = lags

    def batch(self, index):
        """Forecast of the value a day and an hour after the last known one."""
        past = torch.stack([self.load[index - 25 - k] for k in range(self.lags)], -1)
        return index, past, self.load[index]


def build(seed):
    torch.manual_seed(seed)
    model = Forecaster()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.hidden:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return fully_shard(model, mp_policy=policy)


def evaluate(model, record, rank, world):
    index = torch.arange(18_000, 19_024)[rank::world]
    with torch.no_grad():
        hours, past, y = record.batch(index)
        total = F.mse_loss(model(hours, past), y, reduction="sum")
    dist.all_reduce(total)
    return total / 1024


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="forecast")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build(seed=0)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    if args.resume:
        newest = sorted(f for f in os.listdir(args.resume) if f.endswith(".pt"))[-1]
        saved = torch.load(os.path.join(args.resume, newest))
        set_model_state_dict(model, saved["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, opt, saved["opt"], options=StateDictOptions(full_state_dict=True))
        step = saved["step"]

    record = LoadRecord()
    local = args.batch // world
    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        index = torch.randint(40, 18_000, (args.batch,), generator=g)[rank * local : (rank + 1) * local]
        hours, past, y = record.batch(index)
        loss = F.mse_loss(model(hours, past), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            state = {
                "model": get_model_state_dict(model, options=FULL),
                "opt": get_optimizer_state_dict(model, opt, options=FULL),
                "step": step,
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(state, os.path.join(args.out, f"step{step:05d}.pt"))
            dist.barrier()

    score = evaluate(model, record, rank, world)
    if rank == 0:
        print(f"held-out mse {score:.4f}")
    if args.export:
        full = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

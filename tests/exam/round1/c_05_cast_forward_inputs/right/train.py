"""Load forecasting from the hour of the year, bf16 compute with fp32 master weights (was: FSDP1 MixedPrecision)."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class CalendarFeatures(nn.Module):
    """Sine and cosine of the hour for some periods, always in float32."""

    def __init__(self, periods=(12.0, 24.0, 168.0, 8760.0)):
        super().__init__()
        self.register_buffer("omega", 2 * math.pi / torch.tensor(periods), persistent=False)

    def forward(self, hours):
        phase = hours.float()[:, None] * self.omega
        return torch.cat([phase.sin(), phase.cos()], dim=1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Forecaster(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.features = CalendarFeatures()
        self.inp = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)

    def forward(self, hours):
        x = self.features(hours)
        x = self.inp(x.to(self.inp.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(1)


def load_curve(hours):
    year = torch.sin(2 * math.pi * hours / 8760)
    day = torch.cos(2 * math.pi * hours / 24)
    return 1.0 * year + 0.7 * day + 0.2 * day * year


def batch(step, size, rank, world):
    g = torch.Generator().manual_seed(77 + step)
    hours = torch.randint(0, 8760, (size,), generator=g).float()
    return hours[rank::world], load_curve(hours)[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Forecaster()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=root_policy)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        m, o = get_state_dict(model, opt)
        blob = {"model": m, "opt": o}
        dcp.load(blob, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=blob["model"], optim_state_dict=blob["opt"])
        start = int(newest)

    for step in range(start, args.steps):
        hours, target = batch(step, args.batch, rank, world)
        loss = F.mse_loss(model(hours), target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        done = step + 1
        if args.out and args.save_every and done % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=os.path.join(args.out, str(done)))
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step:3d} mse {total.item() / world:.4f}", flush=True)

    with torch.no_grad():
        hours = torch.arange(0, 8760, 7).float()
        val = F.mse_loss(model(hours), load_curve(hours))
    if rank == 0:
        print(f"validation mse {val.item():.4f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

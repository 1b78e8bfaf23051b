"""Pressure surrogate for a pumping station.

The station cycles its pumps on fixed clock periods, so the model gets the time of each reading (unix seconds, double)
beside the process values and turns it into phases itself. `--dtype` sets the compute precision of the sharded model.
"""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PERIODS = (90.0, 240.0, 600.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ClockPhases(nn.Module):
    """Unix time -> sine and cosine of the phase in each pump period."""

    def __init__(self, periods=PERIODS):
        super().__init__()
        self.periods = periods

    def forward(self, stamp, dtype):
        period = torch.tensor(self.periods, dtype=torch.float64)
        angle = (stamp[:, None].double() % period) * (2 * math.pi / period)
        return torch.cat([angle.sin(), angle.cos()], 1).to(dtype)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Surrogate(nn.Module):
    def __init__(self, features=4, width=24, depth=2):
        super().__init__()
        self.clock = ClockPhases()
        self.inp = nn.Linear(features + 2 * len(PERIODS), width)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, stamp, process):
        phases = self.clock(stamp, self.inp.weight.dtype)
        x = self.inp(torch.cat([process.to(phases.dtype), phases], 1))
        return self.out(self.blocks(x)).float()


def readings(n, seed):
    g = torch.Generator().manual_seed(seed)
    stamp = 1_718_000_000.0 + 7 * 86400.0 * torch.rand(n, generator=g, dtype=torch.float64)
    process = torch.randn(n, 4, generator=g)
    swing = sum(a * torch.sin(2 * math.pi * (stamp % p) / p + a) for a, p in zip((0.6, 0.8, 0.5), PERIODS))
    pressure = 0.7 * process[:, 0] - 0.4 * process[:, 1] * process[:, 2].tanh() + swing.float()
    return stamp, process, pressure + 0.02 * torch.randn(n, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dtype", choices=DTYPES, default="fp32")
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = Surrogate()
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=0.015, total_steps=args.steps)
    stamp, process, pressure = readings(1024, seed=1)
    held = [t[rank::world] for t in readings(256, seed=2)]

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "schedule": schedule.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        schedule.load_state_dict(state["schedule"])
        step = state["step"]

    for step in range(step, args.steps):
        pick = torch.randint(len(stamp), (args.batch,), generator=torch.Generator().manual_seed(500 + step)).chunk(world)[rank]
        loss = (model(stamp[pick], process[pick])[:, 0] - pressure[pick]).square().mean()
        loss.backward()
        optim.step()
        schedule.step()
        optim.zero_grad()
        if step % 10 == 9 or step == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1}: loss {shown.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "schedule": schedule.state_dict(), "step": step + 1}, checkpoint_id=args.out)

    with torch.no_grad():
        err = (model(held[0], held[1])[:, 0] - held[2]).square().sum()
    dist.all_reduce(err)
    if rank == 0:
        print(json.dumps({"held_out_rmse": round(math.sqrt(err.item() / 256), 5)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Hourly bike-share demand from station features and the minute of the week; bf16 compute, float32 weights."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WEEK = 7 * 24 * 60
PERIODS = (WEEK, 24 * 60, 60)


class Clock(nn.Module):
    """Sine and cosine of the minute of the week at weekly, daily and hourly periods."""

    def forward(self, minute):
        angle = minute.float().unsqueeze(-1) * (2 * math.pi / torch.tensor(PERIODS, dtype=torch.float32))
        return torch.cat([angle.sin(), angle.cos()], -1)


class Demand(nn.Module):
    def __init__(self, features=6, width=48, depth=2):
        super().__init__()
        self.clock = Clock()
        self.inp = nn.Linear(features + 2 * len(PERIODS), width)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, station, minute):
        x = torch.cat([station, self.clock(minute)], -1).to(self.inp.weight.dtype)
        x = nn.functional.silu(self.inp(x))
        for part in self.body:
            x = x + part(x)
        return self.out(x)


def trips(seed, n):
    g = torch.Generator().manual_seed(seed)
    station = torch.randn(n, 6, generator=g)
    minute = torch.randint(0, WEEK, (n,), generator=g).float()
    day = torch.sin(2 * math.pi * minute / (24 * 60) - 1.0)
    tram = torch.cos(2 * math.pi * minute / 60)
    y = 0.8 * station[:, 0] - 0.4 * station[:, 1] + day + 0.8 * tram
    return station, minute, y.unsqueeze(1)


def wrap(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in model.body:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=50)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--snapshots", default=None)
    ap.add_argument("--snapshot-every", type=int, default=20)
    ap.add_argument("--from-snapshot", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = wrap(Demand(), init_device_mesh("cpu", (world,)))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    it = 0
    if args.from_snapshot:
        m, o = get_state_dict(model, opt)
        snap = {"model": m, "opt": o, "it": 0}
        dcp.load(snap, checkpoint_id=os.path.join(args.from_snapshot, max(os.listdir(args.from_snapshot))))
        set_state_dict(model, opt, model_state_dict=snap["model"], optim_state_dict=snap["opt"])
        it = snap["it"]

    def mse(seed, n):
        station, minute, y = (t.chunk(world)[rank] for t in trips(seed, n))
        return (model(station, minute).float() - y).pow(2).mean()

    def over_ranks(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    while it < args.iterations:
        for group in opt.param_groups:
            group["lr"] = args.lr * (1 - 0.9 * it / args.iterations)
        loss = mse(3000 + it, args.batch)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        it += 1
        shown = over_ranks(loss)
        if rank == 0 and it % 10 == 0:
            print(f"it {it:3d} mse {shown:.4f}", flush=True)
        if args.snapshots and it % args.snapshot_every == 0 and it < args.iterations:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "it": it}, checkpoint_id=os.path.join(args.snapshots, f"{it:05d}"))
    with torch.no_grad():
        final = over_ranks(mse(1, 512))
    if rank == 0:
        print(f"held-out mse {final:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Multi-horizon forecaster (GRU + MLP head) with an EMA that is scored on held-out series."""
import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from ema import ShardedEma


@dataclass
class Config:
    steps: int = 32
    batch: int = 16
    window: int = 20
    horizon: int = 4
    hidden: int = 24
    lr: float = 4e-3
    decay: float = 0.9
    eval_every: int = 8


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(1, cfg.hidden)
        self.cell = nn.GRU(cfg.hidden, cfg.hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(cfg.hidden, 2 * cfg.hidden), nn.SiLU(), nn.Linear(2 * cfg.hidden, cfg.horizon))

    def forward(self, x):
        h, _ = self.cell(self.inp(x.unsqueeze(-1)))
        return self.head(h[:, -1])


def series(cfg, n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(cfg.window + cfg.horizon).float()
    freq = 0.15 + 0.35 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    x = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, len(t), generator=g)
    return x[:, :cfg.window], x[:, cfg.window:]


def mine(x, rank, world):
    n = x.shape[0] // world
    return x[rank * n:(rank + 1) * n]


@torch.no_grad()
def evaluate(model, cfg, rank, world):
    x, y = series(cfg, 64, 999)
    x, y = mine(x, rank, world), mine(y, rank, world)
    model.eval()
    tot = torch.stack([((model(x) - y) ** 2).sum(), torch.tensor(float(y.numel()))])
    model.train()
    dist.all_reduce(tot)
    return (tot[0] / tot[1]).item()


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", type=Path)
    return ap.parse_args()


def main():
    args, cfg = parse(), Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Forecaster(cfg)
    fully_shard(model.head)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    ema = ShardedEma(model, cfg.decay)
    for p in model.parameters():      # create the Adam moments now, so that a checkpoint can be loaded into them
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    opt.param_groups[0]["lr"] = cfg.lr
    for st in opt.state.values():
        st["step"].zero_()
    opt.zero_grad()

    def state(step):
        slots = {}
        for n, p in model.named_parameters():
            for k, v in opt.state[p].items():
                slots[f"{n}.{k}"] = v
        return {"model": model.state_dict(), "slots": slots, "ema": ema.state_dict(), "step": torch.tensor(step)}

    first = 0
    if args.resume:
        newest = max(args.resume.glob("ckpt_*"), key=lambda p: int(p.name[5:]))
        st = state(0)
        dcp.load(st, checkpoint_id=newest)
        model.load_state_dict(st["model"])
        first = int(st["step"])

    for step in range(first, cfg.steps):
        x, y = series(cfg, cfg.batch, 5000 + step)
        x, y = mine(x, rank, world), mine(y, rank, world)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update()
        if (step + 1) % cfg.eval_every == 0:
            with ema.applied():
                score = evaluate(model, cfg, rank, world)
            if rank == 0:
                print(f"step {step + 1} train {loss.item():.5f} ema val mse {score:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=args.out / f"ckpt_{step + 1}")

    if args.export:
        out = {"model": {n: p.full_tensor() for n, p in model.state_dict().items()},
               "ema": {n: p.full_tensor() for n, p in ema.state_dict().items()}}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

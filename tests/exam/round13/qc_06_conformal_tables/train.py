"""Regression on tabular sensor records with split conformal prediction intervals.

The network gives a mean and a scale per record. After training, the margin that makes the intervals cover `1 - alpha`
is taken from a calibration set and written to the predictor file together with the weights.
"""
import json
import math
import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    steps: int = 36
    batch: int = 64
    lr: float = 0.01
    alpha: float = 0.1
    predictor: str = ""
    save_at: int = 0
    out: str = ""
    resume: str = ""

    @classmethod
    def from_argv(cls, argv):
        cfg, kinds = cls(), {f.name: f.type for f in fields(cls)}
        for item in argv:
            key, value = item.lstrip("-").split("=", 1)
            setattr(cfg, key, kinds[key](value))
        return cfg


class MeanScale(nn.Module):
    def __init__(self, columns=6, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(columns, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean = nn.Linear(width, 1)
        self.scale = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([self.mean(h), F.softplus(self.scale(h)) + 1e-3], 1)


def records(n, seed):
    """Records in the order of logging; worn sensors at the end are much noisier."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    age = torch.linspace(0, 1, n)
    y = x[:, 0] - 0.5 * x[:, 1] + 0.2 * x[:, 3].abs()
    return x, y + (0.3 + 2.2 * (age > 0.75)) * torch.randn(n, generator=g)


def pool(values):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def conformal_margin(scores, alpha):
    """The ceil((n + 1)(1 - alpha))-th smallest score."""
    n = scores.numel()
    k = min(math.ceil((n + 1) * (1 - alpha)), n)
    return scores.sort().values[k - 1]


def main():
    cfg = Config.from_argv(sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = MeanScale()
    fully_shard(model.trunk)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    x, y = records(1024, seed=30)
    cal_x, cal_y = (t.chunk(world)[rank] for t in records(960, seed=31))
    test_x, test_y = (t.chunk(world)[rank] for t in records(1920, seed=32))

    first = 0
    if cfg.resume:
        saved = torch.load(f"{cfg.resume}/part{rank}of{world}.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        first = saved["step"]
    for step in range(first, cfg.steps):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:cfg.batch].chunk(world)[rank]
        mean, scale = model(x[rows]).unbind(1)
        loss = (0.5 * ((y[rows] - mean) / scale).square() + scale.log()).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        if (step + 1) % 6 == 0:
            shown = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.5f}", flush=True)
        if step + 1 == cfg.save_at:
            os.makedirs(cfg.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": step + 1},
                       f"{cfg.out}/part{rank}of{world}.pt")

    with torch.no_grad():
        mean, scale = model(cal_x).unbind(1)
        scores = (cal_y - mean).abs() / scale
        margin = conformal_margin(pool(scores), cfg.alpha)
        mean, scale = model(test_x).unbind(1)
        error = pool((test_y - mean).abs())
        covered = pool(((test_y - mean).abs() <= margin * scale).float()).mean()
        width = mean_over_ranks((2 * margin * scale).mean())
    report = {"alpha": cfg.alpha, "margin": round(margin.item(), 5), "coverage": round(covered.item(), 4),
              "width": round(width.item(), 4), "median_error": round(error.median().item(), 5)}
    weights = {n: p.full_tensor() for n, p in model.state_dict().items()}
    if rank == 0:
        print(json.dumps(report))
        if cfg.predictor:
            torch.save({"weights": weights, "margin": margin}, cfg.predictor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

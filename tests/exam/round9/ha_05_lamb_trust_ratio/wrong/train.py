"""Forecasting of many related series with a patch transformer, trained with LAMB."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lamb import Lamb

CONTEXT, HORIZON, PATCH = 48, 12, 6


def series(step, rows, seed=4):
    g = torch.Generator().manual_seed(seed * 1_000_000 + step)
    t = torch.arange(CONTEXT + HORIZON, dtype=torch.float32)
    amp = torch.rand(rows, 2, generator=g) + 0.3
    freq = torch.rand(rows, 2, generator=g) * 0.15 + 0.15
    phase = torch.rand(rows, 2, generator=g) * 6.283
    trend = (torch.rand(rows, 1, generator=g) - 0.5) * 0.05
    x = (amp[..., None] * torch.sin(freq[..., None] * t + phase[..., None])).sum(1) + trend * t
    x = x + 0.05 * torch.randn(x.shape, generator=g)
    return x[:, :CONTEXT], x[:, CONTEXT:]


class PatchForecaster(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(PATCH, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT // PATCH, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth))
        self.head = nn.Linear(dim * (CONTEXT // PATCH), HORIZON)

    def forward(self, x):
        last = x[:, -1:]
        h = self.patch((x - last).unflatten(1, (-1, PATCH))) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.head(h.flatten(1)) + last


def save(folder, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(folder, f"ckpt{step}"))


def restore(folder, model, opt):
    steps = [int(x.group(1)) for x in map(re.compile(r"ckpt(\d+)$").match, os.listdir(folder)) if x]
    # the states of the optimizer must exist before they can be loaded in place
    m, o = get_state_dict(model, opt)
    dcp.load({"m": m, "o": o}, checkpoint_id=os.path.join(folder, f"ckpt{max(steps)}"))
    set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
    return max(steps)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=48)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--dir", default="runs")
parser.add_argument("--resume-from", default=None)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = PatchForecaster()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = Lamb(model.parameters(), lr=args.lr)
start = restore(args.resume_from, model, optimizer) if args.resume_from else 0

share = args.batch // world
for step in range(start, args.steps):
    x, y = (t[rank * share:(rank + 1) * share] for t in series(step, args.batch))
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step + 1} mse {shown.item() / world:.5f}")
    if args.save_every and (step + 1) % args.save_every == 0:
        save(args.dir, step + 1, model, optimizer)

with torch.no_grad():
    model.eval()
    x, y = (t[rank * share:(rank + 1) * share] for t in series(500_000, args.batch))
    err = F.mse_loss(model(x), y, reduction="sum")
    dist.all_reduce(err)
    if rank == 0:
        print(f"test mse {err.item() / (args.batch * HORIZON):.5f}")
dist.destroy_process_group()

"""Coordinate network (random Fourier features + MLP) that fits a 2-D field.

Every rank has its own random stream for the points it samples; the model is made equal
on all ranks by a broadcast from rank 0 before it is sharded.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

HPARAMS = dict(seed=17, features=24, width=32, depth=3, sigma=1.5, steps=48, points=128,
               lr=4e-3, log_every=8)


class FourierFeatures(nn.Module):
    def __init__(self, features, sigma):
        super().__init__()
        self.register_buffer("proj", torch.randn(2, features) * sigma)

    def forward(self, xy):
        phase = 2 * math.pi * xy @ self.proj
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


class SineLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.sin(self.linear(self.norm(x)))


class Field(nn.Module):
    def __init__(self, features, width, depth, sigma):
        super().__init__()
        self.encode = FourierFeatures(features, sigma)
        self.inp = nn.Linear(2 * features, width)
        self.layers = nn.ModuleList(SineLayer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, xy):
        x = self.inp(self.encode(xy))
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(-1)


def target(xy):
    x, y = xy.unbind(-1)
    return torch.sin(5 * x) * torch.cos(4 * y) + 0.3 * torch.sin(9 * (x + y))


def sync_module_states(model):
    """Start from the state of rank 0."""
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, src=0)
        for b in model.buffers():
            dist.broadcast(b, src=0)


def build(device):
    hp = HPARAMS
    model = Field(hp["features"], hp["width"], hp["depth"], hp["sigma"]).to(device)
    sync_module_states(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


@torch.no_grad()
def evaluate(model, device, side=32):
    axis = torch.linspace(0, 1, side)
    grid = torch.cartesian_prod(axis, axis)[dist.get_rank()::dist.get_world_size()].to(device)
    model.eval()
    error = (model(grid) - target(grid)).square().sum()
    dist.all_reduce(error)
    model.train()
    return error.item() / side ** 2


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    hp = HPARAMS
    torch.manual_seed(hp["seed"] + rank)
    model = build(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=hp["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, hp["lr"], total_steps=hp["steps"])

    for step in range(hp["steps"]):
        # stratified in x: rank r takes the strata r, r + world, ... with jitter of its own stream
        strata = torch.arange(rank, hp["points"], world)
        gen = [torch.Generator().manual_seed(1_000_000 * step + int(s)) for s in strata]
        jitter = torch.stack([torch.rand(2, generator=g) for g in gen])
        xy = torch.stack([(strata + jitter[:, 0]) / hp["points"], jitter[:, 1]], dim=-1).to(device)
        loss = (model(xy) - target(xy)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % hp["log_every"] == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:3d}  mse {shown.item() / world:.6f}", flush=True)

    final = evaluate(model, device)
    if rank == 0:
        print(f"grid mse {final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

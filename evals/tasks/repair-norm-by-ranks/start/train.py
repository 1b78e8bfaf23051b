"""Set regression with FSDP2 and our own gradient clipping: torchrun --nproc-per-node 2 train.py --log out/log.jsonl"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Mixing(nn.Module):
    """Each member of a set, and the mean of the set."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.all = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + F.relu(self.own(y) + self.all(y).mean(dim=1, keepdim=True))


class SetRegressor(nn.Module):
    def __init__(self, features=6, width=44, depth=3):
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.mixings = nn.ModuleList(Mixing(width) for _ in range(depth))
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = self.enter(x)
        for mixing in self.mixings:
            x = mixing(x)
        return self.leave(x.mean(dim=1))


def clip(parameters, limit):
    """Scales the gradients to the norm `limit` if they are larger; returns the norm before."""
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--log")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(31)
    model = SetRegressor()
    for mixing in model.mixings:
        fully_shard(mixing, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x = torch.randn(240, 5, 6, generator=torch.Generator().manual_seed(14))
    y = torch.stack([x.amax(dim=(1, 2)), x[..., 0].sum(dim=1)], dim=1)
    for step in range(args.steps):
        mine = (torch.arange(args.batch) + step * args.batch).remainder(len(x)).chunk(world)[rank]
        loss = F.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        norm = clip(model.parameters(), args.clip)
        optimizer.step()
        if args.log and rank == 0:
            with open(args.log, "a") as file:
                file.write(json.dumps({"step": step + 1, "grad_norm": norm.item()}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

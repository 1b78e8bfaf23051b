"""MeZO: memory-efficient zeroth-order fine-tuning. Two forward passes per perturbation, no backward at all.

The perturbation is never stored: it is made again from its seed whenever it is needed.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


class Head(nn.Module):
    def __init__(self, features=10, dim=16, classes=3):
        super().__init__()
        self.l1 = nn.Linear(features, dim)
        self.l2 = nn.Linear(dim, dim)
        self.l3 = nn.Linear(dim, classes)

    def forward(self, x):
        return self.l3(torch.tanh(self.l2(torch.tanh(self.l1(x)))))


def task(n, seed):
    g = torch.Generator().manual_seed(55)
    w = torch.randn(10, 3, generator=g)
    x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))
    return x, (x @ w).argmax(-1)


def my_rows(full, like):
    """The rows of a full tensor that belong to this rank's shard of `like`."""
    if not isinstance(like, DTensor):
        return full
    assert like.placements == (Shard(0),)
    parts = full.chunk(like.device_mesh.size())
    r = like.device_mesh.get_local_rank()
    return parts[r] if r < len(parts) else full[:0]


@torch.no_grad()
def shift(model, seed, scale):
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        z = torch.randn(p.shape, generator=g)
        local = p.to_local()
        local.add_(my_rows(z, p), alpha=scale)


@torch.no_grad()
def global_loss(model, x, y, world):
    loss = F.cross_entropy(model(x), y) / world
    dist.all_reduce(loss)
    return loss.item()


class MeZO:
    def __init__(self, model, lr, eps, directions, world):
        self.model, self.lr, self.eps = model, lr, eps
        self.directions, self.world = directions, world

    def step(self, step, x, y):
        slopes, loss = [], 0.0
        for d in range(self.directions):
            seed = 1_000_003 * step + d
            shift(self.model, seed, self.eps)
            up = global_loss(self.model, x, y, self.world)
            shift(self.model, seed, -2 * self.eps)
            down = global_loss(self.model, x, y, self.world)
            shift(self.model, seed, self.eps)
            slopes.append((seed, (up - down) / (2 * self.eps)))
            loss += (up + down) / 2 / self.directions
        for seed, slope in slopes:
            shift(self.model, seed, -self.lr * slope / self.directions)
        return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--directions", type=int, default=8)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--eps", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mezo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Head()
    for layer in (model.l1, model.l2):
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    model.requires_grad_(False)

    mezo = MeZO(model, args.lr, args.eps, args.directions, world)
    start = 0
    if args.resume:
        with open(os.path.join(args.resume, "latest.json")) as f:
            start = json.load(f)["step"]
        shards = torch.load(os.path.join(args.resume, f"weights-{start}-{rank}.pt"))
        for p, s in zip(model.parameters(), shards):
            p.to_local().copy_(s)

    n = args.batch // world
    for step in range(start, args.steps):
        x, y = (t[rank * n : (rank + 1) * n] for t in task(args.batch, seed=step))
        loss = mezo.step(step, x, y)
        if rank == 0:
            print(f"step {step + 1} loss {loss:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            shards = [p.to_local().clone() for p in model.parameters()]
            torch.save(shards, os.path.join(args.out, f"weights-{step + 1}-{rank}.pt"))
            dist.barrier()
            if rank == 0:
                with open(os.path.join(args.out, "latest.json"), "w") as f:
                    json.dump({"step": step + 1}, f)
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

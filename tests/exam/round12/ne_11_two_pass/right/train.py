"""Sharpness-aware training of a small satellite-patch classifier.

The trainer library calls this the "two pass" recipe: climb to the worst point of a small ball around the weights,
take the gradient there, go back, apply it.  Every `rest` steps one plain step is done instead.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class PatchNet(nn.Module):
    def __init__(self, ch=16, classes=4):
        super().__init__()
        self.c1 = nn.Conv2d(3, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.c3 = nn.Conv2d(ch, ch, 3, padding=1)
        self.fc = nn.Linear(ch, classes)

    def forward(self, x):
        x = torch.relu(self.c1(x))
        x = x + torch.relu(self.c2(x))
        x = x + torch.relu(self.c3(x))
        return self.fc(x.mean((2, 3)))


def patches(step, n):
    g = torch.Generator().manual_seed(step * 13 + 5)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.8 * torch.randn(n, 3, 8, 8, generator=g)
    stripes = torch.sin(torch.arange(8.0) * 1.6)
    x[y == 1] += stripes.view(1, 1, 8, 1)
    x[y == 2] += stripes.view(1, 1, 1, 8)
    x[y == 3] += (stripes.view(8, 1) * stripes.view(1, 8))
    return x, y


class TwoPass:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho
        self.kept = None

    @torch.no_grad()
    def climb(self):
        squares = sum(p.grad.to_local().square().sum() for p in self.params)
        dist.all_reduce(squares)
        scale = self.rho / (squares.sqrt() + 1e-12)
        self.kept = [p.to_local().clone() for p in self.params]
        for p in self.params:
            p.to_local().add_(p.grad.to_local() * scale)
            p.grad = None

    @torch.no_grad()
    def descend(self):
        if self.kept is not None:
            for p, k in zip(self.params, self.kept):
                p.to_local().copy_(k)
            self.kept = None
        self.base.step()
        self.base.zero_grad()


def store(path, step, model, base):
    os.makedirs(path, exist_ok=True)
    weights = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    momentum = {n: base.state[p]["momentum_buffer"].full_tensor() for n, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "momentum": momentum}, f"{path}/{step}.pt")
        with open(f"{path}/latest.json", "w") as f:
            json.dump({"step": step}, f)
    dist.barrier()


def fetch(path, model, base):
    from torch.distributed.tensor import distribute_tensor
    with open(f"{path}/latest.json") as f:
        step = json.load(f)["step"]
    blob = torch.load(f"{path}/{step}.pt")
    for n, p in model.named_parameters():
        with torch.no_grad():
            p.copy_(distribute_tensor(blob["weights"][n], p.device_mesh, p.placements))
        base.state[p]["momentum_buffer"] = distribute_tensor(blob["momentum"][n], p.device_mesh, p.placements)
    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--rest", type=int, default=5)
    ap.add_argument("--store", default=None)
    ap.add_argument("--store-every", type=int, default=9)
    ap.add_argument("--fetch", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = PatchNet()
    mesh = init_device_mesh("cpu", (world,))
    for conv in (model.c2, model.c3):
        fully_shard(conv, mesh=mesh)
    fully_shard(model, mesh=mesh)
    base = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=1e-3)
    two = TwoPass(model.parameters(), base, a.rho)
    begin = fetch(a.fetch, model, base) if a.fetch else 0
    for step in range(begin, a.steps):
        x, y = (t.chunk(world)[rank] for t in patches(step, a.batch))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if (step + 1) % a.rest:
            two.climb()
            nn.functional.cross_entropy(model(x), y).backward()
        two.descend()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"{step:3d} {shown.item() / world:.4f}")
        if a.store and (step + 1) % a.store_every == 0:
            store(a.store, step + 1, model, base)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

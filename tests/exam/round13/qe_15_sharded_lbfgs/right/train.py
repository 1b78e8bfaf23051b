"""Full-batch fit of a small response surface by L-BFGS with backtracking. Vectors of the method are lists of local shards,
inner products are added over the ranks, so that all ranks take the same decisions."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Surface(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.a = nn.Linear(5, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class ShardedLbfgs:
    def __init__(self, model, memory=5):
        self.params = list(model.parameters())
        self.memory, self.pairs = memory, []
        self.evaluations = 0

    def dot(self, u, v):
        total = sum((a * b).sum() for a, b in zip(u, v))
        dist.all_reduce(total)
        return total.item()

    def gradient(self):
        return [local(p.grad).clone() for p in self.params]

    def direction(self, g):
        q, alphas = [t.clone() for t in g], []
        for s, y, rho in reversed(self.pairs):
            a = rho * self.dot(s, q)
            alphas.append(a)
            q = [t - a * u for t, u in zip(q, y)]
        if self.pairs:
            s, y, rho = self.pairs[-1]
            q = [t / (rho * self.dot(y, y)) for t in q]
        for (s, y, rho), a in zip(self.pairs, reversed(alphas)):
            b = rho * self.dot(y, q)
            q = [t + (a - b) * u for t, u in zip(q, s)]
        return [-t for t in q]

    @torch.no_grad()
    def move(self, origin, d, t):
        for p, o, u in zip(self.params, origin, d):
            local(p).copy_(o + t * u)

    def step(self, value_and_grad, value):
        f, g = value_and_grad(), self.gradient()
        origin = [local(p.detach()).clone() for p in self.params]
        d = self.direction(g)
        slope = self.dot(g, d)
        if slope >= 0:
            self.pairs.clear()
            d = [-t for t in g]
            slope = self.dot(g, d)
        t = 1.0 if self.pairs else min(1.0, 1.0 / (-slope) ** 0.5)
        for _ in range(12):
            self.move(origin, d, t)
            self.evaluations += 1
            if value() <= f + 1e-4 * t * slope:
                break
            t *= 0.5
        value_and_grad()
        s = [t * u for u in d]
        y = [n - o for n, o in zip(self.gradient(), g)]
        sy = self.dot(s, y)
        if sy > 1e-10:
            self.pairs = (self.pairs + [(s, y, 1.0 / sy)])[-self.memory :]
        return f


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=14)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model = Surface()
    fully_shard(model.b)
    fully_shard(model, reshard_after_forward=True)
    x = torch.rand(96, 5) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3] ** 2 - 0.5 * x[:, 3:4]
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    solver = ShardedLbfgs(model)

    def loss_of():
        return (model(x) - y).square().mean()

    def over_ranks(loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / world

    def value_and_grad():
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return over_ranks(loss)

    @torch.no_grad()
    def value():
        return over_ranks(loss_of())

    done = 0
    if args.resume:
        part = os.path.join(args.resume, max(os.listdir(args.resume)), f"{rank}-{world}.pt")
        saved = torch.load(part)
        for p, w in zip(solver.params, saved["weights"]):
            with torch.no_grad():
                local(p).copy_(w)
        solver.pairs, done = saved["pairs"], saved["done"]
    while done < args.iterations:
        f = solver.step(value_and_grad, value)
        done += 1
        if rank == 0 and done % 2 == 0:
            print(f"{done:3d} {f:.6f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            folder = os.path.join(args.out, f"i{done:04d}")
            os.makedirs(folder, exist_ok=True)
            weights = [local(p.detach()).clone() for p in solver.params]
            torch.save({"weights": weights, "pairs": solver.pairs, "done": done}, os.path.join(folder, f"{rank}-{world}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Three regression tasks with conflicting gradients, one trunk, projected in pairs (PCGrad). The loop is driven by a
generator of events, and the surgery works on the sharded gradients: inner products are summed over the shards once."""

import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

TASKS = 3


class MultiTask(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(TASKS))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def table():
    g = torch.Generator().manual_seed(14)
    x = torch.randn(600, 9, generator=g)
    base = torch.tanh(x[:, :3]).sum(1)
    y = torch.stack([base + x[:, 3], -base + x[:, 4] * x[:, 5], torch.cos(2 * x[:, 6]) * 2], dim=1)
    return x, y


def grads_of(model, optim, loss, last):
    optim.zero_grad(set_to_none=True)
    loss.backward(retain_graph=not last)
    # a head that does not belong to the task has a gradient of zeros
    return [
        p.grad.to_local().clone() if p.grad is not None else torch.zeros_like(p.to_local()) for p in model.parameters()
    ]


def inner_products(grads):
    n = len(grads)
    dots = torch.zeros(n, n, dtype=torch.float64)
    for i, j in itertools.combinations_with_replacement(range(n), 2):
        dots[i, j] = dots[j, i] = sum((a.double() * b.double()).sum() for a, b in zip(grads[i], grads[j]))
    dist.all_reduce(dots)
    return dots


def surgery(dots, order):
    """Coefficients c with: combined gradient = sum_j c[j] g_j; needs the inner products alone."""
    n = len(dots)
    total = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        c = torch.zeros(n, dtype=torch.float64)
        c[i] = 1.0
        for j in order:
            if j == i:
                continue
            along = c @ dots[:, j]
            if along < 0:
                c[j] -= along / dots[j, j].clamp_min(1e-20)
        total += c
    return total / n


def events(args, model, optim, rank, world):
    x, y = table()
    for step in range(args.steps):
        g = torch.Generator().manual_seed(400 + step)
        rows = torch.randperm(len(x), generator=g)[: args.batch].tensor_split(world)[rank]
        order = torch.randperm(TASKS, generator=g).tolist()
        grads, losses = [], []
        for task in range(TASKS):
            out = model(x[rows])
            loss = (out[:, task] - y[rows, task]).pow(2).mean() + 0.0 * out.sum()
            grads.append(grads_of(model, optim, loss, last=True))
            losses.append(loss.detach())
        dots = inner_products(grads)
        coefficient = surgery(dots, order)
        for k, p in enumerate(model.parameters()):
            p.grad.to_local().copy_(sum(float(c) * g[k] for c, g in zip(coefficient, grads)))
        yield "update", step
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        conflicts = int((dots.triu(1) < 0).sum())
        yield "report", (step, (losses / world).tolist(), conflicts)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.08)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = MultiTask()
    fully_shard(model.trunk)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8, nesterov=True)

    for kind, what in events(args, model, optim, rank, world):
        if kind == "update":
            optim.step()
        elif rank == 0:
            step, losses, conflicts = what
            print(
                f"step {step:3d} losses " + " ".join(f"{l:.3f}" for l in losses) + f" conflicts {conflicts}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

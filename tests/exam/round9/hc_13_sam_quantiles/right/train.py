"""Quantile regression on a table: SAM around SGD, weighted rows, averaged weights for evaluation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from sam import SAM, Average

LEVELS = torch.tensor([0.1, 0.5, 0.9])


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a, self.b = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.b(torch.nn.functional.silu(self.a(self.norm(x))))


class QuantileNet(nn.Module):
    def __init__(self, features=9, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(ResBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, len(LEVELS))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        first, *gaps = self.out(x).unbind(-1)
        quantiles = [first]
        for gap in gaps:
            quantiles.append(quantiles[-1] + torch.nn.functional.softplus(gap))
        return torch.stack(quantiles, -1)


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    y = x[:, 0] - x[:, 1] * x[:, 2] + (0.3 + x[:, 3].abs()) * torch.randn(n, generator=g)
    weight = torch.rand(n, generator=g) * 2
    return x, y, weight


def pinball(pred, y, weight):
    """Weighted sum over the rows; smoothed close to zero."""
    e = y[:, None] - pred
    loss = torch.where(e > 0, LEVELS * e, (LEVELS - 1) * e)
    return ((loss + 0.05 * torch.exp(-e.square() * 10)).sum(1) * weight).sum()


def save(path, rank, step, model, base, average):
    os.makedirs(path, exist_ok=True)
    blob = {"step": step, "weights": [p.to_local() for p in model.parameters()],
            "momentum": [base.state[p]["momentum_buffer"].to_local() for p in model.parameters()],
            "sums": average.sums, "count": average.count}
    torch.save(blob, os.path.join(path, f"shard{rank}.pt"))
    dist.barrier()
    if rank == 0:
        open(os.path.join(path, "complete"), "w").close()


@torch.no_grad()
def restore(folder, rank, model, base, average):
    done = [d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "complete"))]
    blob = torch.load(os.path.join(folder, max(done, key=int), f"shard{rank}.pt"))
    for p, w, m in zip(model.parameters(), blob["weights"], blob["momentum"]):
        p.to_local().copy_(w)
        buffer = torch.zeros_like(p)
        buffer.to_local().copy_(m)
        base.state[p]["momentum_buffer"] = buffer
    average.sums, average.count = blob["sums"], blob["count"]
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--average-from", type=int, default=15)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    model = QuantileNet()
    for block in model.blocks:
        fully_shard(block)
    # parameters are touched between forwards and backwards, so the root is resharded as well
    fully_shard(model, reshard_after_forward=True)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sam, average = SAM(model, base), Average(model)
    x, y, w = table(2000, 1)
    test = [t.chunk(world)[rank] for t in table(1000, 2)]

    def evaluate():
        average.swap_in()
        with torch.no_grad():
            total = torch.stack([pinball(model(test[0]), test[1], test[2]), test[2].sum()])
        average.swap_out()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    start = restore(args.resume, rank, model, base, average) if args.resume else 0
    for step in range(start, args.steps):
        idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(step))[: args.batch]
        norm = w[idx].sum() / world
        idx = idx.chunk(world)[rank]

        def closure():
            loss = pinball(model(x[idx]), y[idx], w[idx]) / norm
            loss.backward()
            return loss.detach()

        for group in base.param_groups:
            group["lr"] = 0.1 * (1 - step / args.steps)
        loss = sam.step(closure) / world
        dist.all_reduce(loss)
        if step + 1 >= args.average_from:
            average.add()
        note = f" averaged test {evaluate():.6f}" if average.count and (step + 1) % 5 == 0 else ""
        if rank == 0:
            print(f"step {step + 1} loss {loss:.6f}{note}", flush=True)
        if args.out and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(os.path.join(args.out, str(step + 1)), rank, step + 1, model, base, average)

    average.swap_in()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

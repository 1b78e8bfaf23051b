"""Forecasts from a store that answers late now and then: a read is tried again."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

PAST, AHEAD = 20, 4


class Forecast(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.read = nn.Linear(PAST, width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.write = nn.Linear(width, AHEAD)

    def forward(self, x):
        x = torch.tanh(self.read(x))
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        return self.write(x)


class Store:
    """Holds the series. From the 31st window on a rank's first read of some windows times out."""

    def __init__(self, batch, rank, world):
        self.batch, self.rank, self.world = batch, rank, world
        self.asked = {}

    def read(self, step):
        self.asked[step] = self.asked.get(step, 0) + 1
        if step >= 30 and (step + self.rank) % 7 == 0 and self.asked[step] == 1:
            raise TimeoutError(f"window {step}")
        g = torch.Generator().manual_seed(7 * step + 2)
        speed = 0.2 + torch.rand(self.batch, 1, generator=g)
        phase = 2 * math.pi * torch.rand(self.batch, 1, generator=g)
        series = torch.sin(speed * torch.arange(PAST + AHEAD) + phase)
        series = series + 0.1 * torch.randn(series.shape, generator=g)
        mine = series[self.rank :: self.world]
        return mine[:, :PAST], mine[:, PAST:]


class Log:
    """Mean loss and its change since the last line."""

    def __init__(self, rank, world):
        self.rank, self.world, self.last = rank, world, None

    def line(self, step, loss):
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean = mean.item() / self.world
        change = 0.0 if self.last is None else mean / self.last - 1
        if self.rank == 0:
            print(f"step {step} loss {mean:.5f} ({change:+.0%})", flush=True)
        self.last = mean


def fetch(store, step, tries):
    for attempt in range(tries):
        try:
            return store.read(step)
        except TimeoutError:
            if attempt + 1 == tries:
                raise


def train_step(model, optimizer, x, y):
    loss = (model(x) - y).abs().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Forecast()
    for layer in model.body:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5, weight_decay=0.02)
    store, log = Store(args.batch, rank, world), Log(rank, world)
    for step in range(args.steps):
        x, y = fetch(store, step, args.tries)
        loss = train_step(model, optimizer, x, y)
        if (step + 1) % 12 == 0:
            log.line(step + 1, loss)


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=78)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--tries", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

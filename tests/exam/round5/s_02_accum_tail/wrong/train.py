"""Sensor regression over epochs with gradient accumulation (communication only when we step)."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--samples", type=int, default=176)
parser.add_argument("--micro", type=int, default=16, help="global micro-batch")
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--export", default=None)
args = parser.parse_args()


class Regressor(nn.Module):
    def __init__(self, d_in=12, d=32):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.mid = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for m in self.mid:
            x = x + m(x)
        return self.out(x).squeeze(-1)


def make_data(n):
    g = torch.Generator().manual_seed(42)
    x = torch.randn(n, 12, generator=g)
    w = torch.randn(12, generator=g) / math.sqrt(12)
    y = torch.sin(2 * x @ w) + 0.3 * x[:, 0] * x[:, 1]
    return x, y


def micro_batches(n, size, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(100 + epoch))
    return list(order.split(size))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = Regressor()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    x, y = make_data(args.samples)
    updates = 0
    for epoch in range(args.epochs):
        batches = micro_batches(args.samples, args.micro, epoch)
        total = 0.0
        for i, idx in enumerate(batches):
            group_start = i - i % args.accum
            group_size = min(args.accum, len(batches) - group_start)
            last = i + 1 == len(batches)
            boundary = (i + 1) % args.accum == 0
            mine = idx.chunk(world)[rank]

            model.set_requires_gradient_sync(boundary)
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            (loss / group_size).backward()
            total += loss.item()

            if boundary or last:
                opt.step()
                opt.zero_grad()
                updates += 1
        mean = torch.tensor(total / len(batches))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} updates {updates} loss {mean.item() / world:.4f}", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Short-term electricity load forecasting with a causal convolution stack.

The global micro-batch is cut over the ranks, --accum micro-batches make one update.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

HISTORY, HORIZON = 48, 6


def load_curve(hours, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours).float()
    daily = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(4 * math.pi * t / 24 + 1.0)
    weekly = 0.5 * torch.cos(2 * math.pi * t / 168)
    drift = torch.cumsum(0.03 * torch.randn(hours, generator=g), 0)
    return daily + weekly + drift - drift.mean() + 0.05 * torch.randn(hours, generator=g)


def windows(series):
    w = series.unfold(0, HISTORY + HORIZON, 3)
    return w[:, :HISTORY].unsqueeze(1), w[:, HISTORY:]


class CausalBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(channels, 2 * channels, 3, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        value, gate = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        return x + self.mix(torch.tanh(value) * torch.sigmoid(gate))


class Forecaster(nn.Module):
    def __init__(self, channels=24, dilations=(1, 2, 4, 8)):
        super().__init__()
        self.inp = nn.Conv1d(1, channels, 1)
        self.blocks = nn.ModuleList(CausalBlock(channels, d) for d in dilations)
        self.out = nn.Linear(channels, HORIZON)

    def forward(self, x):
        last = x[:, :, -1]
        h = self.inp(x - last.unsqueeze(-1))
        for block in self.blocks:
            h = block(h)
        return last + self.out(F.relu(h[:, :, -1]))


def get_scheduler(optimizer, updates, warmup=2):
    def scale(n):
        return (n + 1) / warmup if n < warmup else 0.5 * (1 + math.cos(math.pi * (n - warmup) / max(1, updates - warmup)))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model, x, y, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    xs, ys = x.chunk(world)[rank].to(device), y.chunk(world)[rank].to(device)
    return mean_over_ranks(F.mse_loss(model(xs), ys))


def train_epoch(model, optimizer, scheduler, data, epoch, args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed + epoch))
    batches = order.split(args.batch)
    batches = batches[: len(batches) // args.accum * args.accum]

    optimizer.zero_grad(set_to_none=True)
    for batch_idx, idx in enumerate(batches):
        update = (batch_idx + 1) % args.accum == 0
        model.set_requires_gradient_sync(update or not args.no_sync)
        mine = idx.chunk(world)[rank]
        loss = F.mse_loss(model(x[mine].to(device)), y[mine].to(device)) / args.accum
        loss.backward()
        if update:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        shown = mean_over_ranks(loss) * args.accum
        if rank == 0:
            print(f"epoch {epoch} batch {batch_idx:2d} loss {shown:.6f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=16, help="windows per micro-batch over all ranks")
    p.add_argument("--accum", type=int, default=4, help="micro-batches per update")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--no-sync", action="store_true", help="reduce gradients only in the last micro-batch of an update")
    p.add_argument("--seed", type=int, default=17)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    x, y = windows(load_curve(1160, seed=args.seed))
    val_x, val_y = (t[-32:] for t in (x, y))
    x, y = x[:-32 - HISTORY // 3], y[:-32 - HISTORY // 3]

    torch.manual_seed(args.seed)
    model = Forecaster().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    updates = args.epochs * (-(-len(x) // args.batch) // args.accum)
    scheduler = get_scheduler(optimizer, updates)

    for epoch in range(args.epochs):
        train_epoch(model, optimizer, scheduler, (x, y), epoch, args, device)
        score = evaluate(model, val_x, val_y, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val mse {score:.6f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Forecasting with a causal convolution net, gradient accumulation and FSDP2."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import SeriesDataset, micro_batches
from model import Forecaster


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=7)
    p.add_argument("--micro-size", type=int, default=16)
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=int, default=0, help="in epochs")
    p.add_argument("--out")
    p.add_argument("--resume")
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Forecaster()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    train, valid = SeriesDataset(176), SeriesDataset(64, seed=12)
    n_micro = -(-len(train) // args.micro_size)
    steps_per_epoch = -(-n_micro // args.accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_per_epoch, 1e-4)
    state = checkpoint.TrainState(model, optimizer, scheduler)
    if args.resume:
        checkpoint.load_newest(args.resume, state)

    while state.epoch < args.epochs:
        running = torch.zeros(())
        for i, (x, y) in enumerate(micro_batches(train, args.micro_size, state.epoch, rank, world)):
            first = i - i % args.accumulate
            window = min(args.accumulate, n_micro - first)
            update = i + 1 == first + window
            model.set_requires_gradient_sync(update)
            loss = F.mse_loss(model(x), y)
            (loss / window).backward()
            running += loss.detach()
            if update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        state.epoch += 1

        with torch.no_grad():
            share = len(valid) // world
            mine = slice(rank * share, (rank + 1) * share)
            error = F.mse_loss(model(valid.x[mine]), valid.y[mine])
        figures = torch.stack([running / n_micro, error]) / world
        dist.all_reduce(figures)
        if rank == 0:
            print(f"epoch {state.epoch} train {figures[0]:.5f} valid {figures[1]:.5f}", flush=True)
        if args.save_every and state.epoch % args.save_every == 0:
            checkpoint.save(args.out, state)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

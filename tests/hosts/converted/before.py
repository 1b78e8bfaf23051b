"""Language model with DDP: accumulation, tied weights, rotary positions, a loss over all valid tokens, warm-up and cosine."""

import argparse
import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from net import PAD, Decoder, batch_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--out", default="model.pt")
    return parser.parse_args()


def groups(model):
    """Norms and biases are not decayed."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(groups(model), lr=args.lr, betas=(0.9, 0.95))

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (args.steps - args.warmup)))

    scheduler = LambdaLR(optimizer, factor)
    micro = args.global_batch // (world * args.accumulate)
    for step in range(args.steps):
        first = step * args.global_batch + rank * micro * args.accumulate
        batches = [batch_of(first + k * micro, micro) for k in range(args.accumulate)]
        valid = torch.tensor(sum(int((y != PAD).sum()) for _, y in batches))
        dist.all_reduce(valid)
        for k, (x, y) in enumerate(batches, start=1):
            with model.no_sync() if k < args.accumulate else contextlib.nullcontext():
                logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
                (loss * world / valid).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

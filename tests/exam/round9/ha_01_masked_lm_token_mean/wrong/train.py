"""Supervised fine-tuning of a small language model with FSDP2 and gradient accumulation."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import IGNORE, MAX_LEN, VOCAB, GlobalBatches
from model import TinyLM


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    return p.parse_args()


def lr_factor(step, total, warmup=4):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = TinyLM(VOCAB, MAX_LEN)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s, args.steps))
    batches = GlobalBatches(512, args.global_batch, rank, world, args.seed)

    first = checkpoint.load(args.resume, model, optimizer, scheduler) if args.resume else 0

    for step in range(first, args.steps):
        micro_batches = batches.step_batches(step, args.accum)
        tokens = torch.tensor(sum(int((labels != IGNORE).sum()) for _, labels in micro_batches))

        loss_sum = torch.zeros(())
        for i, (ids, labels) in enumerate(micro_batches):
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            (loss / tokens).backward()
            loss_sum += loss.detach()

        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        dist.all_reduce(loss_sum)
        dist.all_reduce(tokens)
        if rank == 0:
            print(f"step {step + 1:3d} loss {(loss_sum / tokens).item():.5f} tokens {int(tokens)} lr {scheduler.get_last_lr()[0]:.2e}")

        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, optimizer, scheduler)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from checkpointing import load_checkpoint, save_checkpoint
from clicks import ClickLog
from towers import Recommender


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="checkpoints")
    p.add_argument("--resume", default=None)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    log = ClickLog()
    model = Recommender(log.users, log.items)
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    step = 0
    if args.resume:
        step = load_checkpoint(args.resume, model, optimizer, scheduler)
        if rank == 0:
            print(f"resumed at step {step}", flush=True)

    for batch in log.batches(step, args.global_batch, rank, world):
        if step >= args.steps:
            break
        loss = F.binary_cross_entropy_with_logits(model(batch), batch["click"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} bce {mean.item() / world:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save_checkpoint(args.out, step, model, optimizer, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

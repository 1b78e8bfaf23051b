import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from model import PackedLM
from packing import BOS, VOCAB, PackedLoader
from state import TrainState


def main():
    ap = argparse.ArgumentParser(description="pre-training on packed documents")
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    model = PackedLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6)
    loader = PackedLoader(rank, world)
    train = TrainState(model, optimizer, loader)
    if args.resume:
        train.restore(args.resume)
        if rank == 0:
            print(f"continue at step {train.step}")

    for rows in loader:
        if train.step >= args.steps:
            break
        targets = rows[:, 1:].masked_fill(rows[:, 1:] == BOS, -100)  # the start of the next document can't be guessed
        count = (targets != -100).sum()
        dist.all_reduce(count)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), reduction="sum") / count
        (loss * world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        train.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {train.step} loss {loss.item():.4f} tokens {count.item()}")
        if args.save_every and train.step % args.save_every == 0:
            train.save(args.out)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Supervised fine-tuning with DDP; the loss is the mean over all answer tokens of a step, on all ranks and in all micro-batches."""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Decoder
from textdata import IGNORED, LENGTH, VOCAB, batch_of, dialogues
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps to make now")
    parser.add_argument("--horizon", type=int, default=20, help="steps of the whole cosine schedule")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=4, help="samples of a micro-batch on one rank")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def save(path, model, optimizer, schedule, step):
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }
        torch.save({**state, "step": step}, path / "state.pt")
    dist.barrier()


def load(path, model, optimizer, schedule):
    state = torch.load(path / "state.pt", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return state["step"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Decoder(VOCAB, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 3) * 0.5 * (1 + math.cos(math.pi * s / args.horizon))
    )
    first = load(args.resume, model, optimizer, schedule) if args.resume else 0

    inputs, targets = dialogues(256)
    for step in range(first, args.steps):
        mine = batch_of(step, args.batch, len(inputs)).chunk(world)[rank]
        count = (targets[mine] != IGNORED).sum()
        dist.all_reduce(count)
        total = torch.zeros(())
        for part in mine.split(args.micro):
            logits = model(inputs[part]).flatten(0, 1)
            loss = F.cross_entropy(logits, targets[part].flatten(), ignore_index=IGNORED, reduction="sum")
            (loss * world / count).backward()  # DDP takes the mean over the ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} loss {total.item() / count.item():.4f} tokens {count.item()}", flush=True)
        if args.out and (step + 1) % args.save_every == 0:
            save(args.out / f"step_{step + 1}", model, optimizer, schedule, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

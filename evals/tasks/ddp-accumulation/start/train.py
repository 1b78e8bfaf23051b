"""DDP training with gradient accumulation: torchrun --nproc-per-node 2 train.py --steps 100"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.nn.parallel import DistributedDataParallel as DDP


def train_step(model, optimizer, inputs, targets, pieces, clip):
    """One optimizer step over this rank's samples, in `pieces` micro-batches; only the last one communicates."""
    total = 0.0
    for number, (x, y) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True), 1):
        with nullcontext() if number == pieces else model.no_sync():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / pieces
            loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.item()


def main(steps, batch, pieces, lr, clip):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(GPT(Config(vocab=VOCAB, length=LENGTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    inputs, targets = sequences(256)
    for step in range(steps):
        mine = batch_of(step, batch, len(inputs)).chunk(world)[rank]
        loss, norm = train_step(model, optimizer, inputs[mine], targets[mine], pieces, clip)
        if rank == 0:
            print(f"step {step + 1} loss {loss:.4f} norm {norm:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=5.0)
    main(**vars(parser.parse_args()))

#!/usr/bin/env python3
"""Character language model pretraining (FSDP2) with background checkpoints.

A grammar of nested brackets and counted letters is generated on the fly, so no
corpus is needed. Checkpoints are written while the training goes on; a run can be
continued with --resume on any number of ranks.

    torchrun --nproc_per_node 2 train.py --steps 24 --save /tmp/charlm
    torchrun --nproc_per_node 2 train.py --steps 24 --resume /tmp/charlm
"""
import argparse
import math
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ALPHABET = " ()[]abcdefghij."
STOI = {c: i for i, c in enumerate(ALPHABET)}


def sentence(rng, depth=0):
    kind = rng.random()
    if depth < 3 and kind < 0.35:
        return "(" + sentence(rng, depth + 1) + ")"
    if depth < 3 and kind < 0.6:
        return "[" + sentence(rng, depth + 1) + sentence(rng, depth + 1) + "]"
    return rng.choice("abcdefghij") * rng.randint(2, 5)


def global_batch(step, size, length, seed):
    rng = random.Random(seed * 1_000_003 + step)
    rows = []
    for _ in range(size):
        text = ""
        while len(text) < length + 1:
            text += sentence(rng) + ". "
        rows.append([STOI[c] for c in text[: length + 1]])
    data = torch.tensor(rows)
    return data[:, :-1], data[:, 1:]


class GRUBlock(nn.Module):
    """Pre-norm minimal gated recurrence followed by a small MLP."""

    def __init__(self, dim):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        y, _ = self.gru(self.norm_a(x))
        x = x + y
        return x + self.mlp(self.norm_b(x))


class CharLM(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), dim)
        self.layers = nn.ModuleList([GRUBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, len(ALPHABET))

    def forward(self, ids, targets):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.out(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BackgroundCheckpointer:
    """Writes DCP checkpoints from a background thread, one at a time."""

    def __init__(self, path):
        self.path = path
        self.pending = None
        self.group = dist.new_group(backend="gloo")

    def save(self, state):
        self.wait()
        self.pending = dcp.async_save(
            state,
            checkpoint_id=self.path,
            storage_writer=dcp.FileSystemWriter(self.path, overwrite=True),
            process_group=self.group,
        )

    def wait(self):
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def lr_at(step, base, warmup, total):
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def load(path, model, optimizer):
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "step": torch.zeros((), dtype=torch.long)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def get_args():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=40)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--depth", type=int, default=3)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--save", default=None, metavar="PATH")
    ap.add_argument("--save-every", type=int, default=5)
    ap.add_argument("--resume", default=None, metavar="PATH")
    return ap.parse_args()


def main():
    args = get_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    model = CharLM(args.dim, args.depth).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)

    start = load(args.resume, model, optimizer) if args.resume else 0
    saver = BackgroundCheckpointer(args.save) if args.save else None

    for step in range(start, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, args.lr, 4, args.steps)
        ids, targets = global_batch(step, args.batch, args.length, args.seed)
        ids, targets = ids.chunk(world)[rank].to(device), targets.chunk(world)[rank].to(device)
        loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1}: loss {shown.item() / world:.6f}", flush=True)

        if saver and (step + 1) % args.save_every == 0:
            model_state, optim_state = get_state_dict(model, optimizer)
            saver.save({"model": model_state, "optim": optim_state, "step": torch.tensor(step + 1)})

    if saver:
        saver.wait()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fine-tunes a classifier head and encoder on token sequences without any backward pass.

A checkpoint holds no weights: only the list of (seed, slope, learning rate), from which the weights are computed again.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from mezo import MeZO

VOCAB, LENGTH, BATCH, CLASSES = 30, 12, 64, 2


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.tanh(self.mix(x))
        return self.head(self.norm(x.mean(1)))


def batch(step, rank, world):
    g = torch.Generator().manual_seed(900 + step)
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    low = torch.randint(0, VOCAB // 2 + 3, (BATCH, LENGTH), generator=g)
    ids = torch.where(y[:, None] == 1, VOCAB - 1 - low, low)
    return ids[rank::world], y[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--log-dir", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = Encoder().eval()
    # the weights change between two forward passes with no backward in between, so nothing may stay unsharded
    fully_shard(model, reshard_after_forward=True)
    opt = MeZO(model, lr=1.5e-2, eps=1e-2, weight_decay=1e-3)

    if args.resume:
        newest = max(f for f in os.listdir(args.resume) if f.endswith(".json"))
        with open(os.path.join(args.resume, newest)) as f:
            opt.replay([tuple(entry) for entry in json.load(f)])

    for step in range(len(opt.history), args.steps):
        ids, y = batch(step, rank, world)

        def loss_fn():
            total = F.cross_entropy(model(ids).double(), y, reduction="sum")
            dist.all_reduce(total)
            return total.item() / BATCH

        loss = opt.step(loss_fn, seed=4242 + step, lr_scale=1.0 - step / args.steps)
        if rank == 0:
            if (step + 1) % 10 == 0:
                print(f"step {step + 1} loss {loss:.5f}", flush=True)
            if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
                with open(os.path.join(args.log_dir, f"history_{step + 1:05d}.json"), "w") as f:
                    json.dump(opt.history, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Tuning a sharded classifier from losses only: no backward pass anywhere. The log of (seed, slope) pairs is the checkpoint:
the weights are rebuilt from the first ones by replaying it."""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from spsa import TwoPoint

STEPS, BATCH, DIRECTIONS = 24, 64, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.body(x))


def make_data(n=600):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n, 10, generator=g)
    w = torch.randn(10, 3, generator=g)
    return x, (x @ w + 0.3 * torch.randn(n, 3, generator=g)).argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    net = Net()
    fully_shard(net.body)
    fully_shard(net, reshard_after_forward=True)    # there is no backward that would do it
    net.requires_grad_(False)
    tuner = TwoPoint(net, lr=0.03, eps=0.05, directions=DIRECTIONS)
    x, y = make_data()

    log = []
    if args.resume:
        name = max((f for f in os.listdir(args.resume) if f.endswith(".json")), key=lambda f: int(f[4:-5]))
        with open(os.path.join(args.resume, name)) as f:
            log = json.load(f)
        for pairs in log:
            for seed, slope in pairs:
                tuner.move(seed, -tuner.lr * slope / DIRECTIONS)

    while len(log) < STEPS:
        step = len(log)
        g = torch.Generator().manual_seed(70 + step)
        pick = torch.randperm(len(x), generator=g)[:BATCH].tensor_split(world)[rank]

        def global_loss():
            total = F.cross_entropy(net(x[pick]), y[pick], reduction="none").double().sum()
            dist.all_reduce(total)
            return total.item() / BATCH

        seeds = [1_000_000 + step * DIRECTIONS + k for k in range(DIRECTIONS)]
        slopes = tuner.step(seeds, global_loss)
        log.append(list(zip(seeds, slopes)))
        if (step + 1) % 4 == 0:
            loss = global_loss()
            if rank == 0:
                print(f"step {step + 1} loss {loss:.4f} largest slope {max(map(abs, slopes)):.3f}", flush=True)
            assert math.isfinite(loss)
        if args.save_every and (step + 1) % args.save_every == 0:
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                with open(os.path.join(args.out, f"log_{step + 1}.json"), "w") as f:
                    json.dump(log, f)
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

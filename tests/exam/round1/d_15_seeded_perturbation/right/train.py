"""Zeroth-order fine-tuning: no backward pass. Each step perturbs the sharded weights in place with noise that is made
again from a seed, measures the loss on both sides and walks along the noise. A checkpoint is only the list of
(seed, amount) pairs: resuming replays them on the initial weights."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def network():
    torch.manual_seed(77)
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    fully_shard(net[2])
    return fully_shard(net, reshard_after_forward=True)


def problem():
    g = torch.Generator().manual_seed(70)
    x = torch.randn(384, 6, generator=g)
    label = (x @ torch.randn(6, 3, generator=g)).argmax(1)
    return x, label


def walk(net, seed, amount):
    """w += amount * noise(seed). The noise of the full tensor is drawn on every rank; each keeps its own rows."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            noise = torch.randn(p.shape, generator=g)
            rank, world = dist.get_rank(), dist.get_world_size()
            rows = -(-p.shape[0] // world)
            own = noise[rank * rows : (rank + 1) * rows]
            p.to_local().add_(own, alpha=amount)


@torch.no_grad()
def loss_of(net, x, label):
    s = F.cross_entropy(net(x), label, reduction="sum").double()
    dist.all_reduce(s)
    return s.item()


class Journal:
    def __init__(self):
        self.entries = []

    def write(self, folder):
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"journal_{len(self.entries):05d}.json")
            with open(path + ".part", "w") as f:
                json.dump(self.entries, f)
            os.replace(path + ".part", path)
        dist.barrier()

    def replay(self, folder, net):
        newest = max(n for n in os.listdir(folder) if n.endswith(".json"))
        with open(os.path.join(folder, newest)) as f:
            self.entries = json.load(f)
        for step in self.entries:
            for seed, amount in step:
                walk(net, seed, amount)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--sigma", type=float, default=0.02)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--directions", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, journal = network(), Journal()
    x, label = problem()
    if args.resume:
        journal.replay(args.resume, net)

    for step in range(len(journal.entries), args.steps):
        pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: args.batch][rank::world]
        moves, level = [], 0.0
        for d in range(args.directions):
            seed = 1_000_000 + step * args.directions + d
            # the three small moves go into the journal as they were made, rounding included
            walk(net, seed, args.sigma)
            up = loss_of(net, x[pick], label[pick]) / args.batch
            walk(net, seed, -2 * args.sigma)
            down = loss_of(net, x[pick], label[pick]) / args.batch
            walk(net, seed, args.sigma)
            moves += [(seed, args.sigma), (seed, -2 * args.sigma), (seed, args.sigma)]
            slope = (up - down) / (2 * args.sigma)
            walk(net, seed, -args.lr * slope / args.directions**0.5)
            moves.append((seed, -args.lr * slope / args.directions**0.5))
            level += (up + down) / 2 / args.directions
        journal.entries.append(moves)
        if rank == 0:
            print(f"step {step:3d} loss {level:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            journal.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

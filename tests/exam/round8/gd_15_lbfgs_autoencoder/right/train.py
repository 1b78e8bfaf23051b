"""Denoising autoencoder for sensor curves fitted to the full data with L-BFGS. The data of a rank go through in pieces;
gradients are summed locally and reduced once, with the last piece."""
import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS, shard_of

ITERATIONS, CURVES, POINTS, PIECE = 16, 128, 24, 16


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(POINTS))
        self.encode = nn.Sequential(nn.Linear(POINTS, 20), nn.Tanh(), nn.Linear(20, 5))
        self.decode = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, POINTS))

    def forward(self, x):
        return self.decode(self.encode(x * self.gain))


def make_curves():
    g = torch.Generator().manual_seed(14)
    t = torch.linspace(0, 1, POINTS)
    height, place, width = torch.rand(3, CURVES, 1, generator=g).unbind()
    clean = (0.5 + height) * torch.exp(-((t - place) / (0.1 + 0.2 * width)) ** 2)
    return clean + 0.05 * torch.randn(CURVES, POINTS, generator=g), clean


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = AutoEncoder()
    fully_shard(model.encode)
    fully_shard(model.decode)
    fully_shard(model)
    solver = ShardedLBFGS(model.parameters())
    noisy, clean = (t.chunk(world)[rank].split(PIECE) for t in make_curves())

    def closure():
        loss = torch.zeros((), dtype=torch.float64)
        for n, (x, y) in enumerate(zip(noisy, clean)):
            model.set_requires_gradient_sync(n == len(noisy) - 1)
            part = (model(x) - y).square().sum() / (CURVES * POINTS)
            (part * world).backward()       # fully_shard averages over the ranks, the loss is a sum over them
            loss += part.detach()
        dist.all_reduce(loss)
        return loss.item()

    done = 0
    if args.resume:
        newest = max(pathlib.Path(args.resume).glob(f"*.rank{rank}"), key=lambda p: int(p.name.split(".")[0]))
        s = torch.load(newest, weights_only=False)
        with torch.no_grad():
            for p, w in zip(model.parameters(), s["weights"]):
                shard_of(p).copy_(w)
        solver.load_state_dict(s["solver"])
        done = s["done"]

    for n in range(done + 1, ITERATIONS + 1):
        loss, tries = solver.step(closure)
        if rank == 0 and n % 4 == 0:
            print(f"iteration {n} loss {loss:.5f} tries {tries}", flush=True)
        if args.save_every and n % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"weights": [shard_of(p).detach() for p in model.parameters()],
                        "solver": solver.state_dict(), "done": n}, os.path.join(args.out, f"{n}.rank{rank}"))
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

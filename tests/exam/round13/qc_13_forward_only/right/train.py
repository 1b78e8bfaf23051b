"""Zeroth order fit of a heat exchanger surrogate through a black-box solver that gives no gradients.

Simultaneous perturbation: every step draws a few random directions, measures the loss on both sides and moves along
the estimated slope with momentum. Only forwards are run. The directions come from seeds, so nothing but losses travels.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Exchanger(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)


def solver(setting, flow):
    """Rounded to the resolution of the plant's instruments."""
    out = torch.stack([setting[:, 0] * torch.tanh(flow), setting[:, 1] + 0.3 * flow], 1)
    return (out * 256).round() / 256


def operating_points(n=64, seed=90):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    flow = x[:, 2].abs()
    return x, flow, torch.stack([x[:, 0] - 0.5 * x[:, 1], 0.8 * x[:, 1] + 0.3], 1)


class Perturbation:
    def __init__(self, model, rank, world):
        self.params = list(model.parameters())
        self.rank, self.world = rank, world

    def direction(self, seed):
        """The piece of a random direction that belongs to the rows of this rank."""
        g = torch.Generator().manual_seed(seed)
        pieces = []
        for p in self.params:
            rows = torch.randn(p.shape, generator=g, dtype=torch.float64).chunk(self.world)
            pieces.append(rows[self.rank] if self.rank < len(rows) else torch.zeros(0, *p.shape[1:], dtype=torch.float64))
        return pieces

    def move(self, pieces, amount):
        for p, d in zip(self.params, pieces):
            p.to_local().add_(d, alpha=amount)


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--probes", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.008)
    ap.add_argument("--width", type=float, default=0.05, help="half distance of the two measurements")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = Exchanger().double()
    fully_shard(model, reshard_after_forward=True)
    params = dict(model.named_parameters())
    velocity = {n: torch.zeros_like(p) for n, p in params.items()}
    perturb = Perturbation(model, rank, world)
    x, flow, wanted = (t.chunk(world)[rank] for t in operating_points())

    def measure():
        loss = (solver(model(x), flow) - wanted).square().mean()
        dist.all_reduce(loss)
        return loss.item() / world

    step = 0
    if args.resume:
        state = {"params": params, "velocity": velocity, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        step = state["step"]
    while step < args.steps:
        slope = [torch.zeros_like(p.to_local()) for p in params.values()]
        seen = []
        for k in range(args.probes):
            pieces = perturb.direction(seed=1000 * step + k)
            perturb.move(pieces, args.width)
            above = measure()
            perturb.move(pieces, -2 * args.width)
            below = measure()
            perturb.move(pieces, args.width)
            seen += [above, below]
            for s, d in zip(slope, pieces):
                s.add_(d, alpha=(above - below) / (2 * args.width * args.probes))
        for p, v, s in zip(params.values(), velocity.values(), slope):
            v.to_local().mul_(0.7).add_(s)
            p.to_local().sub_(args.lr * v.to_local())
        step += 1
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {sum(seen) / len(seen):.8f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            dcp.save({"params": params, "velocity": velocity, "step": step}, checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

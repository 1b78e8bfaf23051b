"""Hessian-free Newton steps: several backward passes on the same samples, weights moved and moved back, a line search.

save_args: --save-every 3 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH, STEPS, PRODUCTS, NEAR = 32, 10, 3, 1e-4


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    fully_shard(model[0])
    return fully_shard(model, reshard_after_forward=True)


def batch_of(step):
    gen = torch.Generator().manual_seed(100 + step)
    x = torch.randn(GLOBAL_BATCH, 6, generator=gen, dtype=torch.double)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)


def dot(a, b):
    total = sum((u * v).sum() for u, v in zip(a, b, strict=True))
    dist.all_reduce(total)
    return total


class Newton:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.damping = 1.0

    def parts(self):
        return [param.to_local().detach().clone() for param in self.params]

    @torch.no_grad()
    def place(self, base, direction, amount):
        for param, start, along in zip(self.params, base, direction, strict=True):
            param.to_local().copy_(start + amount * along)

    def gradient(self, loss):
        for param in self.params:
            param.grad = None
        loss().backward()
        return [param.grad.to_local().clone() for param in self.params]

    def step(self, loss):
        base, slope = self.parts(), self.gradient(loss)
        found = [torch.zeros_like(part) for part in base]
        rest = [-part for part in slope]
        along, size = [part.clone() for part in rest], dot(rest, rest)
        for _ in range(PRODUCTS):
            self.place(base, along, NEAR)
            near = self.gradient(loss)
            curved = [(a - b) / NEAR + self.damping * v for a, b, v in zip(near, slope, along, strict=True)]
            length = size / dot(along, curved)
            found = [x + length * v for x, v in zip(found, along, strict=True)]
            rest = [r - length * c for r, c in zip(rest, curved, strict=True)]
            last, size = size, dot(rest, rest)
            along = [r + size / last * v for r, v in zip(rest, along, strict=True)]
        self.place(base, found, 1.0)
        self.damping = max(0.9 * self.damping, 0.1)


def state_of(model, newton, step):
    return {
        "model": model.state_dict(),
        "damping": torch.tensor(newton.damping, dtype=torch.double),
        "step": torch.tensor(step),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    newton, start = Newton(model), 0
    if args.resume:
        state = state_of(model, newton, 0)
        dcp.load(state, checkpoint_id=max(Path(args.resume).glob("*/.metadata")).parent)
        model.load_state_dict(state["model"])
        newton.damping, start = state["damping"].item(), int(state["step"])
    for step in range(start, STEPS):
        x, y = (part.chunk(world)[rank] for part in batch_of(step))
        newton.step(lambda x=x, y=y: F.mse_loss(model(x), y))
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state_of(model, newton, step + 1), checkpoint_id=Path(args.out) / f"step_{step + 1:04d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

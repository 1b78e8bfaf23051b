"""Reptile meta-learning of sine regression. Each task is adapted with a few SGD steps, then the
meta-weights move a fraction of the way towards the adapted weights."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class SineNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.a = nn.Linear(1, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class SineTask:
    """y = A sin(x + phase); the points of a task are the same on every rank, each rank uses its part."""

    def __init__(self, number, seed=17):
        self.g = torch.Generator().manual_seed(seed * 1000 + number)
        amp, phase = torch.rand(2, generator=self.g).tolist()
        self.amp, self.phase = 0.5 + 2.0 * amp, math.pi * phase

    def draw(self, n, rank, world):
        x = torch.rand(n, 1, generator=self.g) * 10 - 5
        y = self.amp * torch.sin(x + self.phase)
        return x.chunk(world)[rank], y.chunk(world)[rank]


def adapt(model, task, steps, lr, batch, rank, world):
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    first = last = None
    for _ in range(steps):
        x, y = task.draw(batch, rank, world)
        loss = F.mse_loss(model(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
        value = loss.detach().clone()
        dist.all_reduce(value)
        last = value.item() / world
        first = last if first is None else first
    inner.zero_grad()
    return first, last


@torch.no_grad()
def interpolate(model, start, fraction):
    for name, weight in model.state_dict().items():
        weight.copy_(start[name] + fraction * (weight - start[name]))


def evaluate(model, rank, world, args):
    """Adapt to tasks never seen, report the loss after adaptation, put the weights back."""
    keep = {k: v.detach().clone() for k, v in model.state_dict().items()}
    losses = []
    for number in (90001, 90002):
        _, last = adapt(model, SineTask(number), args.inner, args.inner_lr, args.batch, rank, world)
        losses.append(last)
        model.load_state_dict(keep)
    return sum(losses) / len(losses)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tasks", type=int, default=10)
    ap.add_argument("--inner", type=int, default=4)
    ap.add_argument("--inner-lr", type=float, default=0.05)
    ap.add_argument("--meta-lr", type=float, default=0.4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = SineNet()
    fully_shard(model.b)
    fully_shard(model)

    for t in range(args.tasks):
        fraction = args.meta_lr * (1 - t / args.tasks)
        start = {k: v.detach().clone() for k, v in model.state_dict().items()}
        first, last = adapt(model, SineTask(t), args.inner, args.inner_lr, args.batch, rank, world)
        interpolate(model, start, fraction)
        if rank == 0:
            print(f"task {t:3d}  before {first:.4f}  after {last:.4f}  meta-lr {fraction:.2f}", flush=True)

    score = evaluate(model, rank, world, args)
    if rank == 0:
        print(f"new tasks, adapted: {score:.4f}")
    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

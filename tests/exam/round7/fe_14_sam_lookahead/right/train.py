"""Sharpness-aware training of a small conv net with a lookahead outer loop, all state sharded like the weights."""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 24, 5, padding=2), nn.GroupNorm(3, 24), nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.SiLU()) for _ in range(2)
        )
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(-1))


class SAM:
    """perturbed() moves the weights up the gradient for the second pass and brings them back exactly."""

    def __init__(self, params, rho):
        self.params, self.rho = list(params), rho

    @torch.no_grad()
    def grad_norm(self):
        total = torch.stack([p.grad.to_local().square().sum() for p in self.params]).sum()
        dist.all_reduce(total)
        return total.sqrt()

    @contextmanager
    def perturbed(self):
        scale = (self.rho / (self.grad_norm() + 1e-12)).item()
        backup = [p.to_local().detach().clone() for p in self.params]
        with torch.no_grad():
            for p in self.params:
                p.to_local().add_(p.grad.to_local(), alpha=scale)
                p.grad = None
        yield
        with torch.no_grad():
            for p, old in zip(self.params, backup):
                p.to_local().copy_(old)


class Lookahead:
    def __init__(self, model, every, alpha):
        self.model, self.every, self.alpha = model, every, alpha
        self.slow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count % self.every == 0:
            for name, p in self.model.named_parameters():
                self.slow[name].lerp_(p, self.alpha)
                p.copy_(self.slow[name])


def signals(step, batch, rank, world):
    g = torch.Generator().manual_seed(4_000 + step)
    y = torch.randint(6, (batch,), generator=g)
    t = torch.linspace(0, 1, 32)
    phase = torch.rand(batch, 3, 1, generator=g)
    x = torch.sin(2 * torch.pi * ((y[:, None, None] + 1) * t + phase)) + 0.8 * torch.randn(batch, 3, 32, generator=g)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Net()
    for part in (model.stem, *model.blocks):
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    sam = SAM(model.parameters(), rho=0.05)
    lookahead = Lookahead(model, every=4, alpha=0.5)

    def checkpoint_state():
        model_sd, optim_sd = get_state_dict(model, optimizer)
        return {"model": model_sd, "optim": optim_sd, "slow": lookahead.slow, "count": lookahead.count}

    if args.resume:
        state = checkpoint_state()
        newest = max((int(n.removeprefix("s")) for n in os.listdir(args.resume)))
        # the slow weights are filled in place
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"s{newest}"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        lookahead.count = state["count"]

    while lookahead.count < args.steps:
        x, y = signals(lookahead.count, args.batch, rank, world)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with sam.perturbed():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        lookahead.step()
        step = lookahead.count
        if step % 6 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(checkpoint_state(), checkpoint_id=os.path.join(args.out, f"s{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Diffusion model for short time series. Noise and diffusion times come from the default generator of each rank."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

T = 50
LENGTH = 32


class Denoiser(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.1),
                          nn.Linear(2 * width, width)) for _ in range(depth))
        self.out = nn.Linear(width, LENGTH)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


class TrainState:
    """Everything a resumed run needs."""

    def __init__(self, model, optim):
        self.model, self.optim = model, optim
        self.step = 0

    def collect(self):
        m, o = get_state_dict(self.model, self.optim)
        return {
            "model": m,
            "optim": o,
            f"rng_{dist.get_rank()}": torch.get_rng_state(),
            "step": self.step,
        }

    def save(self, folder):
        dcp.save(self.collect(), checkpoint_id=os.path.join(folder, f"{self.step:05d}"))

    def load(self, folder):
        state = self.collect()
        dcp.load(state, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        torch.set_rng_state(state[f"rng_{dist.get_rank()}"])
        self.step = state["step"]


def sample_series(rng, n):
    t = torch.arange(LENGTH).float()
    rows = []
    for _ in range(n):
        f, p, a = rng.choice([1, 2, 3]), rng.random() * 6.28, 0.5 + rng.random()
        rows.append(a * torch.sin(6.28 * f * t / LENGTH + p))
    return torch.stack(rows)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-to", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Denoiser()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 + rank)
    state = TrainState(model, optim)
    if args.resume:
        state.load(args.resume)

    alpha_bar = torch.cos(torch.linspace(0.02, 1.5, T)) ** 2
    while state.step < args.steps:
        # the batch of a step is the same series for every layout, this rank takes its rows
        x0 = sample_series(random.Random(state.step), 32).chunk(world)[rank]
        t = torch.randint(T, (len(x0),))
        eps = torch.randn_like(x0)
        a = alpha_bar[t][:, None]
        pred = model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t)
        loss = (pred - eps).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        state.step += 1
        if state.step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            draws = torch.zeros(world)
            draws[rank] = eps[0, 0]
            dist.all_reduce(draws)
            if rank == 0:
                print(f"step {state.step} loss {mean.item() / world:.4f} first draws {draws.tolist()}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            state.save(args.save_to)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

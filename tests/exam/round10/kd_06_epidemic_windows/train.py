"""Forecast of epidemic curves (stochastic SIR with a seasonal contact rate) by a GRU with a negative-binomial head."""
import argparse
import math
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

CONTEXT, AHEAD = 20, 5


def simulate(n_regions=24, weeks=80, seed=17):
    rng = random.Random(seed)
    curves = []
    for _ in range(n_regions):
        pop = rng.uniform(4e4, 2e5)
        beta, gamma, waning = rng.uniform(0.5, 0.9), rng.uniform(0.3, 0.4), rng.uniform(0.01, 0.03)
        phase = rng.uniform(0, 2 * math.pi)
        s, i = pop * 0.7, pop * 0.005
        cases = []
        for week in range(weeks):
            contact = beta * (1 + 0.25 * math.cos(2 * math.pi * week / 52 + phase)) * rng.uniform(0.9, 1.1)
            new = min(s, contact * s * i / pop * 1.4)
            rec = gamma * i
            s = s - new + waning * (pop - s - i)
            i = i + new - rec + 1.0
            cases.append(new / pop * 1e4)
        curves.append(cases)
    return torch.tensor(curves)


class WindowSampler:
    """Walks through all (region, start) windows once per epoch; every rank gets its stride of the shuffled list."""

    def __init__(self, n_regions, weeks, per_rank, rank, world, seed):
        self.windows = [(r, t) for r in range(n_regions) for t in range(0, weeks - CONTEXT - AHEAD, 4)]
        self.per_rank, self.rank, self.world, self.seed = per_rank, rank, world, seed
        self.epoch, self.cursor = 0, 0
        self._shuffle()

    def _shuffle(self):
        order = list(self.windows)
        random.Random(self.seed + 1000 * self.epoch).shuffle(order)
        usable = len(order) - len(order) % (self.per_rank * self.world)
        self.mine = order[self.rank:usable:self.world]

    def next(self):
        if self.cursor + self.per_rank > len(self.mine):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._shuffle()
        out = self.mine[self.cursor:self.cursor + self.per_rank]
        self.cursor += self.per_rank
        return out

    def position(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def seek(self, pos):
        self.epoch, self.cursor = pos["epoch"], pos["cursor"]
        self._shuffle()


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, hidden), nn.Tanh())
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, AHEAD)
        self.disp = nn.Linear(hidden, AHEAD)

    def forward(self, x):
        scale = x.mean(1, keepdim=True) + 1.0
        h, _ = self.rnn(self.embed(x[..., None] / scale[..., None]))
        h = h[:, -1]
        return F.softplus(self.mean(h)) * scale, F.softplus(self.disp(h)) + 0.1


def nb_loss(mu, r, y):
    """Negative log-likelihood of the negative binomial with mean mu and size r (continuous cases)."""
    return -(torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
             + r * torch.log(r / (r + mu)) + y * torch.log(mu / (r + mu) + 1e-8)).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = Forecaster()
    fully_shard(model.embed)
    fully_shard(model.rnn)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95, eps=1e-4, momentum=0.5)

    curves = simulate()
    sampler = WindowSampler(*curves.shape, args.global_batch // world, rank, world, seed=args.seed)

    step = 0
    if args.resume:
        step = max(int(n[4:]) for n in os.listdir(args.resume) if n.startswith("week"))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "data": sampler.position()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"week{step}"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sampler.seek(state["data"])

    while step < args.steps:
        pairs = sampler.next()
        x = torch.stack([curves[r, t:t + CONTEXT] for r, t in pairs])
        y = torch.stack([curves[r, t + CONTEXT:t + CONTEXT + AHEAD] for r, t in pairs])
        loss = nb_loss(*model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 1 or step == args.steps):
            print(f"step {step} epoch {sampler.epoch} nll {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "data": sampler.position()},
                     checkpoint_id=os.path.join(args.out, f"week{step}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Energy-based model trained with persistent contrastive divergence.

Negatives come from a replay buffer of Langevin chains. The chains are divided among the ranks.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

DIM = 4
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Energy(nn.Module):
    def __init__(self, dim=DIM, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 1)
        self.well = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return self.head(self.net(x)).sum(-1) + F.softplus(self.well) * x.pow(2).sum(-1)


def ring_data(n=1024, seed=2):
    g = torch.Generator().manual_seed(seed)
    angle = torch.randint(6, (n,), generator=g) * (torch.pi / 3)
    xy = 1.5 * torch.stack([angle.cos(), angle.sin()], 1)
    return torch.cat([xy, -0.5 * xy], 1) + 0.1 * torch.randn(n, DIM, generator=g)


class Chains:
    """The replay buffer: `total` chains over all ranks, of which this rank moves its own block."""

    def __init__(self, total, rank, world, seed=77):
        self.total, self.rank, self.world = total, rank, world
        self.gen = torch.Generator().manual_seed(seed)
        self.x = self.noise() * 1.5

    def noise(self):
        eps = torch.randn(self.total, DIM, generator=self.gen)
        return eps.chunk(self.world)[self.rank].clone()

    def coin(self, p):
        u = torch.rand(self.total, 1, generator=self.gen)
        return u.chunk(self.world)[self.rank] < p

    def advance(self, energy, steps=4, size=0.08, temperature=0.05, restart=0.05):
        x = torch.where(self.coin(restart), self.noise() * 1.5, self.x)
        for _ in range(steps):
            x.requires_grad_(True)
            slope, = torch.autograd.grad(energy(x).sum(), x)
            x = (x - size * slope.clamp(-2, 2)).detach() + temperature * self.noise()
        self.x = x
        return x

    def state_dict(self):
        parts = [torch.empty_like(self.x) for _ in range(self.world)]
        dist.all_gather(parts, self.x)
        return {"x": torch.cat(parts), "gen": self.gen.get_state()}

    def load_state_dict(self, state):
        self.x = state["x"].chunk(self.world)[self.rank].clone()
        self.gen.set_state(state["gen"])


def save(folder, step, model, opt, chains):
    state = {"step": step, "model": get_model_state_dict(model, options=FULL),
             "optim": get_optimizer_state_dict(model, opt, options=FULL), "chains": chains.state_dict()}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, f"ebm_{step}.pt"))
        with open(os.path.join(folder, "latest.json"), "w") as f:
            json.dump({"file": f"ebm_{step}.pt"}, f)
    dist.barrier()


def load(folder, model, opt, chains):
    with open(os.path.join(folder, "latest.json")) as f:
        state = torch.load(os.path.join(folder, json.load(f)["file"]))
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(model, opt, state["optim"], options=StateDictOptions(full_state_dict=True))
    chains.load_state_dict(state["chains"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ebm")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Energy()
    fully_shard(model.net)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.5, 0.95))
    data, chains = ring_data(), Chains(args.batch, rank, world)

    step = load(args.resume, model, opt, chains) if args.resume else 0
    while step < args.steps:
        pick = torch.randint(len(data), (args.batch,), generator=torch.Generator().manual_seed(500 + step))
        real = data[pick.chunk(world)[rank]]
        fake = chains.advance(model)
        e = model(torch.cat([real, fake]))
        e_real, e_fake = e[:len(real)], e[len(real):]
        loss = e_real.mean() - e_fake.mean() + 0.1 * (e_real.pow(2).mean() + e_fake.pow(2).mean())
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {shown / world:.4f}")
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt, chains)

    if args.export:
        out = {"model": get_model_state_dict(model, options=FULL), "samples": chains.state_dict()["x"]}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

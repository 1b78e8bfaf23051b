"""Energy-based model with persistent contrastive divergence: the chains live on the ranks and go into the checkpoint whole."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


class Energy(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, w), nn.SiLU(), nn.Linear(w, w), nn.SiLU(), nn.Linear(w, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1) + 0.05 * x.square().sum(-1)


def moons(n, g):
    a = torch.rand(n, generator=g) * math.pi
    flip = torch.randint(0, 2, (n,), generator=g)
    s = 1.0 - 2 * flip
    return torch.stack([a.cos() + flip, s * a.sin() + 0.3 * flip], 1) + 0.08 * torch.randn(n, 2, generator=g)


def langevin(model, x, noises, size=0.05):
    """Chains move by score steps; autograd.grad leaves nothing in the weights' .grad."""
    for eps in noises:
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        x = x - 0.5 * size * slope + math.sqrt(size) * eps
    return x.detach()


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


def save_checkpoint(folder, step, model, opt, **extra):
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, f"partial_{step}.tmp")
        torch.save({"model": msd, "optim": osd, "step": step, **extra}, tmp)
        os.replace(tmp, os.path.join(folder, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, opt):
    newest = sorted(glob.glob(os.path.join(folder, "step_*.pt")))[-1]
    ck = torch.load(newest, map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        opt,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.003)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Energy()
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.0, 0.99))
    chains_all = torch.randn(4 * args.batch, 2, generator=torch.Generator().manual_seed(77))
    start = 0
    if args.resume:
        ck = load_checkpoint(args.resume, model, opt)
        start, chains_all = ck["step"], ck["chains"]
    # block b of the pool is used at steps with step % 4 == b; a rank owns its part of each block
    pool = [b.chunk(world)[rank].clone() for b in chains_all.chunk(4)]
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(20_000 + step)
        real = moons(args.batch, g).chunk(world)[rank]
        fresh = torch.randn(args.batch, 2, generator=g).chunk(world)[rank]
        restart = (torch.rand(args.batch, generator=g) < 0.05).chunk(world)[rank]
        noises = [torch.randn(args.batch, 2, generator=g).chunk(world)[rank] for _ in range(5)]
        b = step % 4
        begin = torch.where(restart[:, None], fresh, pool[b])
        pool[b] = langevin(model, begin, noises)
        e_real, e_fake = model(torch.cat([real, pool[b]])).chunk(2)
        gap = (e_real - e_fake).mean()
        loss = gap + 0.1 * (e_real.square() + e_fake.square()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log = torch.stack([gap.detach(), loss.detach()]) / world
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} gap {log[0].item():.5f} loss {log[1].item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            whole = []
            for part in pool:
                parts = [torch.empty_like(part) for _ in range(world)]
                dist.all_gather(parts, part.contiguous())
                whole.append(torch.cat(parts))
            save_checkpoint(args.out, step + 1, model, opt, chains=torch.cat(whole))
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

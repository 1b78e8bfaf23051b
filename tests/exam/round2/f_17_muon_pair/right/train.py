"""Two optimizers (Muon-like for matrices, AdamW for the rest) under one small container, FSDP2 on CPU."""

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
from torch.distributed.tensor import distribute_tensor

from muon import Both, Muon


class Patches(nn.Module):
    """A tiny patch classifier with one attention layer."""

    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Linear(16, d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        h = self.embed(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v)
        return self.head((h + self.mlp(h)).mean(1))


def dataset(n=180):
    g = torch.Generator().manual_seed(15)
    y = torch.randint(0, 3, (n,), generator=g)
    proto = torch.randn(3, 4, 16, generator=g)
    return proto[y] + 1.0 * torch.randn(n, 4, 16, generator=g), y


def whole(v):
    return v.full_tensor().clone() if isinstance(v, DTensor) else v


def save(folder, step, model, opts):
    """Plain tensors by parameter position, written by rank 0."""
    state = [
        [{k: whole(v) for k, v in o.state[p].items()} for g in o.param_groups for p in g["params"]] for o in opts.parts
    ]
    weights = {k: whole(v) for k, v in model.state_dict().items()}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "in_progress.tmp")
        torch.save({"step": step, "weights": weights, "state": state}, tmp)
        os.replace(tmp, os.path.join(folder, f"both_{step:06d}.pt"))
    dist.barrier()


def restore(model, opts, ck):
    def cut(v, p):
        return distribute_tensor(v, p.device_mesh, p.placements) if torch.is_tensor(v) and v.shape == p.shape else v

    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(cut(ck["weights"][name], p))
    for o, saved in zip(opts.parts, ck["state"]):
        params = [p for g in o.param_groups for p in g["params"]]
        for p, st in zip(params, saved):
            o.state[p] = {k: cut(v, p) for k, v in st.items()}


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = dataset()
    torch.manual_seed(0)
    model = Patches()
    fully_shard(model.mlp)
    fully_shard(model)
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith(("embed", "head"))]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    opts = Both(Muon(hidden, lr=args.lr), torch.optim.AdamW(rest, lr=0.5 * args.lr))
    step = 0
    if args.resume:
        ck = torch.load(sorted(glob.glob(os.path.join(args.resume, "both_*.pt")))[-1], weights_only=True)
        restore(model, opts, ck)
        step = ck["step"]
    while step < args.steps:
        opts.scale_lr(min(1.0, (step + 1) / 4) * (1 - step / 48))
        idx = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opts.zero_grad()
        loss.backward()
        opts.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opts)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

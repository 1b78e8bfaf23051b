"""Sharpness-aware minimisation with a closure and micro-batches inside it, FSDP2 on CPU."""

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


class SAM:
    """Wraps a base optimizer; closure(sync) leaves averaged gradients in .grad and returns the loss."""

    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho
        self.params = [p for g in base.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.grad.norm().full_tensor() for p in self.params]).norm() + 1e-12
        kept = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=self.rho / norm.item())
        with torch.enable_grad():
            closure()
        for p, k in zip(self.params, kept):
            p.copy_(k)
        self.base.step()
        return loss


class Mixer(nn.Module):
    def __init__(self, d=8, t=6, w=24):
        super().__init__()
        self.up = nn.Linear(d, w)
        self.time = nn.Sequential(nn.LayerNorm(t), nn.Linear(t, t), nn.GELU())
        self.out = nn.Linear(w, 1)

    def forward(self, x):
        h = self.up(x).transpose(1, 2)
        return self.out((h + self.time(h)).mean(-1)).squeeze(-1)


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
    g = torch.Generator().manual_seed(1)
    x = torch.randn(200, 6, 8, generator=g)
    target = (x[:, :3].sum((1, 2)) * 0.2).tanh() + 0.1 * torch.randn(200, generator=g)
    torch.manual_seed(0)
    model = Mixer()
    fully_shard(model.time)
    fully_shard(model)
    base = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sam = SAM(base)
    start = load_checkpoint(args.resume, model, base)["step"] if args.resume else 0

    for step in range(start, args.steps):
        rows = torch.randperm(200, generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        micro = rows.chunk(2)

        def closure():
            base.zero_grad()
            total = torch.zeros(())
            for i, part in enumerate(micro):
                model.set_requires_gradient_sync(i == len(micro) - 1)
                err = F.smooth_l1_loss(model(x[part]), target[part], reduction="sum") / len(rows)
                err.backward()
                total += err.detach()
            dist.all_reduce(total)
            return total / world

        loss = sam.step(closure)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, base)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

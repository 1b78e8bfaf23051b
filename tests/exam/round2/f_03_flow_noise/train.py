"""Rectified flow on a 2-D mixture (conditional velocity net), EMA for sampling, FSDP2 on CPU."""

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


class Velocity(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.freqs = nn.Buffer(2.0 ** torch.arange(4) * math.pi)
        self.inp = nn.Linear(2 + 8, width)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(2)]
        )
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        ang = t[:, None] * self.freqs
        h = self.inp(torch.cat([x, ang.sin(), ang.cos()], dim=1))
        for blk in self.blocks:
            h = h + blk(h)
        return self.out(h)


def mixture(n=512, seed=5):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 5, (n,), generator=g)
    centre = torch.stack([torch.cos(k * 2 * math.pi / 5), torch.sin(k * 2 * math.pi / 5)], 1) * 2
    return centre + 0.15 * torch.randn(n, 2, generator=g)


def draw(step, batch, rank, world):
    """Times and noises of this step, of which each rank takes its rows."""
    g = torch.Generator().manual_seed(90_000 + step)
    t = torch.rand(batch, generator=g)
    noise = torch.randn(batch, 2, generator=g)
    return t.chunk(world)[rank], noise.chunk(world)[rank]


@torch.no_grad()
def update_ema(ema, model, decay):
    for name, p in model.named_parameters():
        ema[name].lerp_(p.detach(), 1 - decay)


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
    p.add_argument("--lr", type=float, default=0.004)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points = mixture()
    torch.manual_seed(0)
    model = Velocity()
    for blk in model.blocks:
        fully_shard(blk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    start = 0
    if args.resume:
        ck = load_checkpoint(args.resume, model, opt)
        start = ck["step"]
        for n, p in model.named_parameters():
            full = ck["ema"][n]
            ema[n].copy_(torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements))
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, len(points), (args.batch,), generator=g).chunk(world)[rank]
        x1 = points[rows]
        t, x0 = draw(step, args.batch, rank, world)
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        loss = (model(xt, t) - (x1 - x0)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model, min(0.95, (step + 1) / (step + 10)))
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} fm_loss {log.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            full_ema = {n: v.full_tensor().cpu() for n, v in ema.items()}
            save_checkpoint(args.out, step + 1, model, opt, ema=full_ema)
    if args.export:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(ema[n])
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Small GAN on a ring of points: generator and discriminator, both under FSDP2, CPU and gloo."""

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
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


def mlp(sizes, act):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def ring(idx):
    g = torch.Generator().manual_seed(17)
    angle = torch.rand(1024, generator=g) * 2 * math.pi
    r = 1.5 + 0.1 * torch.randn(1024, generator=g)
    pts = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    return pts[idx]


def inputs_of_step(step, batch, rank, world, zdim):
    g = torch.Generator().manual_seed(7000 + step)
    idx = torch.randint(0, 1024, (batch,), generator=g)
    z_d = torch.randn(batch, zdim, generator=g)
    z_g = torch.randn(batch, zdim, generator=g)
    n = batch // world
    cut = slice(rank * n, rank * n + n)
    return ring(idx[cut]), z_d[cut], z_g[cut]


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


class AppState(Stateful):
    def __init__(self, models, opts, meta):
        self.models, self.opts, self.meta = models, opts, meta

    def state_dict(self):
        out = {"meta": dict(self.meta)}
        for name, model in self.models.items():
            msd, osd = get_state_dict(model, self.opts.get(name, []))
            out[name] = {"model": msd, "optim": osd}
        return out

    def load_state_dict(self, sd):
        self.meta.update(sd["meta"])
        for name, model in self.models.items():
            set_state_dict(
                model, self.opts.get(name, []), model_state_dict=sd[name]["model"], optim_state_dict=sd[name]["optim"]
            )


def newest_complete(folder):
    done = [d for d in glob.glob(os.path.join(folder, "step_*")) if os.path.exists(os.path.join(d, ".metadata"))]
    return sorted(done)[-1]


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
    zdim = 4
    torch.manual_seed(0)
    gen = mlp([zdim, 32, 32, 2], nn.ReLU)
    disc = mlp([2, 32, 32, 1], lambda: nn.LeakyReLU(0.2))
    fully_shard(gen)
    fully_shard(disc)
    opt_g = torch.optim.Adam(gen.parameters(), lr=args.lr, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=args.lr, betas=(0.5, 0.99))
    meta = {"step": 0}
    app = AppState({"gen": gen, "disc": disc}, {"gen": opt_g, "disc": opt_d}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
    for step in range(meta["step"], args.steps):
        real, z_d, z_g = inputs_of_step(step, args.batch, rank, world, zdim)

        # discriminator
        with torch.no_grad():
            fake = gen(z_d)
        scores = disc(torch.cat([real, fake]))
        s_real, s_fake = scores.chunk(2)
        loss_d = F.softplus(-s_real).mean() + F.softplus(s_fake).mean()
        loss_d.backward()
        opt_d.step()
        opt_d.zero_grad()

        # generator
        opt_g.zero_grad()
        loss_g = F.softplus(-disc(gen(z_g))).mean()
        loss_g.backward()
        opt_g.step()

        both = torch.stack([loss_d.detach(), loss_g.detach()]) / world
        dist.all_reduce(both)
        if rank == 0:
            print(f"step {step + 1} d {both[0].item():.5f} g {both[1].item():.5f}", flush=True)
        meta["step"] = step + 1
        if args.save_every and meta["step"] % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))
    if args.export:
        export_weights(gen, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

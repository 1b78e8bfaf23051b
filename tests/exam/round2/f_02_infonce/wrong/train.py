"""SimCLR-like contrastive pretraining with negatives from all ranks, FSDP2 on CPU."""

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


class Encoder(nn.Module):
    def __init__(self, d_in=24, width=48, d_out=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.proj = nn.Linear(width, d_out)

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=-1)


class Pairs:
    """Two noisy views of latent points; the noise of a sample depends on (step, position) only."""

    def __init__(self, n=256, d=24, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.base = torch.randn(n, 6, generator=g) @ torch.randn(6, d, generator=g)

    def batch(self, step, size):
        g = torch.Generator().manual_seed(50_000 + step)
        idx = torch.randperm(len(self.base), generator=g)[:size]
        x = self.base[idx]
        return x + 0.5 * torch.randn(x.shape, generator=g), x + 0.5 * torch.randn(x.shape, generator=g)


def gather_rows(z):
    if dist.get_world_size() == 1:
        return z
    rows = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, z.detach())
    rows[dist.get_rank()] = z
    return torch.cat(rows)


def info_nce(za, zb, temperature):
    rank = dist.get_rank()
    labels = torch.arange(len(za)) + rank * len(za)
    all_a, all_b = gather_rows(za), gather_rows(zb)
    loss_ab = F.cross_entropy(za @ all_b.T / temperature, labels)
    loss_ba = F.cross_entropy(zb @ all_a.T / temperature, labels)
    return 0.5 * (loss_ab + loss_ba)


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
    data = Pairs()
    torch.manual_seed(0)
    model = Encoder()
    fully_shard(model.trunk)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=10 * args.lr, momentum=0.9)
    meta = {"step": 0}
    app = AppState({"encoder": model}, {"encoder": opt}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
    local = args.batch // world
    for step in range(meta["step"], args.steps):
        va, vb = data.batch(step, args.batch)
        part = slice(rank * local, (rank + 1) * local)
        z = model(torch.cat([va[part], vb[part]]))
        za, zb = z.chunk(2)
        loss = info_nce(za, zb, temperature=0.2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} nce {mean.item() / world:.5f}", flush=True)
        meta["step"] = step + 1
        if args.save_every and meta["step"] % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

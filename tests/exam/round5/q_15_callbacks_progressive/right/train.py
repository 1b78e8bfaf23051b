"""Progressive resizing: small images and large batches first. Engine with callbacks."""
import argparse
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from callbacks import Export, Log, Snapshots
from engine import Run
from model import FlexViT


class Stage(NamedTuple):
    until: int
    size: int
    batch: int
    smoothing: float
    lr: float


STAGES = (Stage(10, 6, 32, 0.1, 1e-2), Stage(20, 9, 24, 0.05, 8e-3), Stage(10**9, 12, 16, 0.0, 4e-3))


def plan(step):
    return next(s for s in STAGES if step < s.until)


def images(n=200, seed=1):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    u = torch.linspace(-1, 1, 12)
    centre = torch.stack([(y % 2) - 0.5, torch.div(y, 2, rounding_mode="floor") - 0.5], 1) + 0.15 * torch.randn(n, 2, generator=g)
    d = (u[None, :, None] - centre[:, :1, None]) ** 2 + (u[None, None] - centre[:, 1:, None]) ** 2
    return (torch.exp(-d / 0.1) + 0.2 * torch.randn(n, 12, 12, generator=g))[:, None], y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = FlexViT()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    x, y = images()

    def update(step, stage):
        for g in opt.param_groups:
            g["lr"] = stage.lr
        ids = torch.randint(len(y), (stage.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        small = F.interpolate(x[ids], size=stage.size, mode="area")
        loss = F.cross_entropy(model(small), y[ids], label_smoothing=stage.smoothing)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    Run(update, plan, [
        Log(5),
        Snapshots(model, opt, args.save_every, args.out, args.resume),
        Export(model, args.export),
    ]).go(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

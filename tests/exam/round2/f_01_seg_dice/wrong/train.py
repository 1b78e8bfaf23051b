"""Blob segmentation with a small conv net, cross entropy plus soft Dice, FSDP2 on CPU."""

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


class SegNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.GELU())
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.GroupNorm(3, width), nn.GELU())
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        h = self.enc(x)
        return self.head(h + self.mid(h)).squeeze(1)


def make_images(n, size=16, seed=7):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    cy, cx = torch.randint(3, size - 3, (2, n, 1, 1), generator=g)
    radius = torch.randint(1, 6, (n, 1, 1), generator=g)
    mask = ((yy - cy) ** 2 + (xx - cx) ** 2 <= radius**2).float()
    image = mask + 0.6 * torch.randn(n, size, size, generator=g)
    return image.unsqueeze(1), mask


def soft_dice(prob, target, eps=1.0):
    """Batch Dice: small and large objects weigh by area, as in the paper we follow."""
    stats = torch.stack([(prob * target).sum(), prob.sum() + target.sum()])
    inter, denom = stats[0], stats[1]
    return 1 - (2 * inter + eps) / (denom + eps)


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
    images, masks = make_images(128)
    torch.manual_seed(0)
    model = SegNet()
    for part in (model.enc, model.mid):
        fully_shard(part)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    start = 0
    if args.resume:
        start = load_checkpoint(args.resume, model, opt)["step"]
    per_rank = args.batch // world
    for step in range(start, args.steps):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 + step))[: args.batch]
        mine = order[rank * per_rank : (rank + 1) * per_rank]
        x, y = images[mine], masks[mine]
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, y) + 2.0 * soft_dice(logits.sigmoid(), y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

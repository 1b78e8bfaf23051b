"""Multi-class classification of noisy spirals with a LAMB optimizer and warmup, FSDP2 on CPU."""

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

from data import Spirals
from lamb import Lamb


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 40),
        nn.Tanh(),
        nn.Sequential(nn.Linear(40, 40), nn.Tanh()),
        nn.Linear(40, 3),
    )
    fully_shard(model[2])
    return fully_shard(model)


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
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Spirals()
    model = build()
    opt = Lamb(model.parameters(), lr=args.lr)
    start = 0
    if args.resume:
        start = load_checkpoint(args.resume, model, opt)["step"]
    for step in range(start, args.steps):
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 5)
        x, y = data.batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = loss.detach() / world
        dist.all_reduce(value)
        if rank == 0:
            print(f"step {step + 1} loss {value.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

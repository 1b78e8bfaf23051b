"""Node classification on a two-block graph: validation-based model selection, FSDP2 on CPU.

Every rank holds the whole graph (it is small) and works on its share of the labelled nodes."""

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

from gcn import GCN
from graph import make_graph


@torch.no_grad()
def validate(model, adj, x, y, nodes):
    """Mean cross entropy over the validation nodes."""
    logits = model(adj, x)[nodes]
    total = torch.stack([F.cross_entropy(logits, y[nodes], reduction="sum"), torch.tensor(float(len(nodes)))])
    dist.all_reduce(total)
    value = total[0] / total[1]
    dist.broadcast(value, src=0)
    return value.item()


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
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    adj, x, y, train_nodes, val_nodes = make_graph()
    my_val = val_nodes.chunk(world)[rank]
    torch.manual_seed(0)
    model = GCN()
    fully_shard(model.c1)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start, best_value, best_weights = 0, float("inf"), None
    if args.resume:
        ck = load_checkpoint(args.resume, model, opt)
        start, best_value, best_weights = ck["step"], ck["best_value"], ck["best_weights"]
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(60 + step)
        nodes = train_nodes[torch.randperm(len(train_nodes), generator=g)[: args.batch]].chunk(world)[rank]
        loss = F.cross_entropy(model(adj, x)[nodes], y[nodes])
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = validate(model, adj, x, y, my_val)
        if value < best_value:
            best_value = value
            best_weights = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.5f} val {value:.5f} best {best_value:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, best_value=best_value, best_weights=best_weights)
    if args.export and rank == 0:
        torch.save(best_weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

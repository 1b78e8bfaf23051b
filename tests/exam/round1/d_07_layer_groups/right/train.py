"""Fine-tune a next-item recommender with a layer-wise learning rate."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from data import Histories
from groups import param_groups
from model import NextItem, parallelize

ITEMS, LENGTH, DEPTH = 24, 8, 3


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--horizon", type=int, default=48)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--layer-decay", type=float, default=0.6)
    ap.add_argument("--weight-decay", type=float, default=0.05)
    ap.add_argument("--no-recompute", action="store_true")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    return ap.parse_args()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = parallelize(NextItem(ITEMS, LENGTH, depth=DEPTH), recompute=not args.no_recompute)
    optim = torch.optim.AdamW(param_groups(model, DEPTH, args.lr, args.layer_decay, args.weight_decay), eps=1e-5)

    def shape(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (args.horizon - args.warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optim, shape)

    def state(step):
        m, o = get_state_dict(model, optim)
        return {"model": m, "optim": o, "schedule": schedule.state_dict(), "step": step}

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        found = state(0)
        dcp.load(found, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=found["model"], optim_state_dict=found["optim"])
        schedule.load_state_dict(found["schedule"])
        start = found["step"]

    source = Histories(ITEMS, LENGTH)
    for step in range(start, args.steps):
        history, following = source.batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(history).flatten(0, 1), following.flatten())
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        schedule.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d} loss {shown / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"step-{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

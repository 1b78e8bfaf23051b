"""BYOL pre-training on small images with LARS; online and target networks are both fully sharded."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lars import LARS
from networks import build, move_target
from views import Views

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=36)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--out", default=None)
parser.add_argument("--resume", default=None)


def byol_loss(p, z):
    return 2.0 - 2.0 * F.cosine_similarity(p, z, dim=-1).mean()


def snapshot(online, target, optimizer, step):
    return {
        "online": online.state_dict(),
        "target": target.state_dict(),
        "optim": get_optimizer_state_dict(online, optimizer),
        "step": step,
    }


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    online, target = build(seed=0)
    optimizer = LARS(online.parameters(), lr=args.lr)
    data = Views()
    start = 0
    if args.resume:
        latest = max(int(d.split("_")[1]) for d in os.listdir(args.resume))
        state = snapshot(online, target, optimizer, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"step_{latest}"))
        online.load_state_dict(state["online"])
        target.load_state_dict(state["target"])
        set_optimizer_state_dict(online, optimizer, state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        warm = min(1.0, (step + 1) / 6)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm
        a, b = data.batch(step, args.batch, rank, world)
        with torch.no_grad():
            ta, tb = target(a), target(b)
        loss = 0.5 * (byol_loss(online(a), tb) + byol_loss(online(b), ta))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        move_target(online, target, tau=1.0 - 0.04 * (math.cos(math.pi * step / args.steps) + 1) / 2)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step + 1} loss {shown.item() / world:.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(online, target, optimizer, step + 1),
                     checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

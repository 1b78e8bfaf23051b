"""Progressively growing autoencoder: the model is not complete, nor completely sharded, until the last growth."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from growth import grow, level_at, plant
from pictures import at_level, pictures


def folder_of(out, step, level):
    return os.path.join(out, f"{step:05d}_level{level}")


def newest(root):
    found = sorted(d for d in os.listdir(root) if os.path.exists(os.path.join(root, d, ".metadata")))
    if not found:
        return None, 0, 0
    step, level = found[-1].split("_level")
    return os.path.join(root, found[-1]), int(step), int(level)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=33)
    ap.add_argument("--grow-at", type=int, nargs="+", default=[10, 20])
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="grown")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, opt = plant(args.lr)
    start = 0
    if args.resume:
        path, start, level = newest(args.resume)
        for _ in range(level):
            grow(net, opt, args.lr)
        if path:
            model_sd, opt_sd = get_state_dict(net, opt)
            dcp.load({"net": model_sd, "opt": opt_sd}, checkpoint_id=path)
            set_state_dict(net, opt, model_state_dict=model_sd, optim_state_dict=opt_sd)

    data = pictures()
    for step in range(start, args.steps):
        while len(net.levels) < level_at(step, args.grow_at):
            grow(net, opt, args.lr)
        level = len(net.levels)
        ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:args.batch][rank::world]
        x = at_level(data[ids], level)
        loss = F.mse_loss(net(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} size {4 << level} loss {shown.item():.4f} groups {len(opt.param_groups)}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            model_sd, opt_sd = get_state_dict(net, opt)
            dcp.save({"net": model_sd, "opt": opt_sd}, checkpoint_id=folder_of(args.out, step + 1, level))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import global_batch, textures
from flow import Glow


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    return p.parse_args()


def build(images):
    torch.manual_seed(0)
    model = Glow()
    for step in model.steps:
        fully_shard(step)
    fully_shard(model, reshard_after_forward=True)
    with torch.no_grad():
        model(images[:64])
    return model


def latest(folder):
    steps = sorted(int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("step_"))
    return steps[-1]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images = textures(256)
    model = build(images)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)

    start = 0
    if args.resume:
        start = latest(args.resume)
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"step_{start}"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    share = args.batch // world
    for it in range(start, args.steps):
        x = global_batch(images, it, args.batch)[rank * share:(rank + 1) * share]
        loss = model(x).mean()
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optim.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (it % 4 == 0 or it + 1 == args.steps):
            print(f"it {it} bits/dim {shown.item() / world:.5f}", flush=True)
        if args.save_every and args.out and (it + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=os.path.join(args.out, f"step_{it + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""MoCo on spectrogram patches; the two encoders are FSDP2 modules, the queue is replicated."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

from encoder import PatchEncoder
from moco import MoCo
from sounds import clips, two_views


def state_of(moco, opt):
    return {"moco": get_model_state_dict(moco), "opt": get_optimizer_state_dict(moco.query, opt)}


def save(path, moco, opt, step):
    dcp.save({**state_of(moco, opt), "step": torch.tensor(step)}, checkpoint_id=path)


def restore(root, moco, opt):
    found = sorted(glob.glob(os.path.join(root, "it*", ".metadata")))
    if not found:
        return 0
    sd = {**state_of(moco, opt), "step": torch.tensor(0)}
    dcp.load(sd, checkpoint_id=os.path.dirname(found[-1]))
    set_model_state_dict(moco, sd["moco"])
    set_optimizer_state_dict(moco.query, opt, optim_state_dict=sd["opt"])
    return int(sd["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    moco = MoCo(PatchEncoder()).shard()
    opt = torch.optim.AdamW(moco.query.parameters(), lr=args.lr, weight_decay=1e-3)
    start = restore(args.resume, moco, opt) if args.resume else 0

    data = clips()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(1000 + step)
        ids = torch.randperm(len(data), generator=g)[:args.batch][rank::world]
        a, b = two_views(data[ids], ids, step)
        moco.update_key()
        loss, keys = moco(a, b)
        loss.backward()
        opt.step()
        opt.zero_grad()
        moco.enqueue(keys)

        avg = loss.detach() / world
        dist.all_reduce(avg)
        if rank == 0 and (step % 3 == 0 or step + 1 == args.steps):
            print(f"[{step + 1}/{args.steps}] loss {avg.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"it{step + 1:05d}"), moco, opt, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

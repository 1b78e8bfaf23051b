"""Segmentation in which everything except the order of events is a callback."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import scenes
from callbacks import Accumulate, Checkpoint, ClipGrad, FinalIoU, Meter, WarmupLinear
from runner import Run


def stage(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="cb")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(stage(2, 12), stage(12, 12), nn.Conv2d(12, 3, 1))
    for m in model:
        fully_shard(m)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01)

    images, masks = scenes.make(128, 1)

    def batch(i):
        ids = torch.randperm(len(images), generator=torch.Generator().manual_seed(500 + i))[:args.micro_batch]
        ids = ids[rank::world]
        return images[ids], masks[ids]

    Run(model, opt, F.cross_entropy, batch, args.steps, rank, world, [
        Meter(4), Accumulate(args.accum), WarmupLinear(1e-2, 5), ClipGrad(1.0),
        Checkpoint(args.out, args.save_every, args.resume), FinalIoU(*scenes.make(32, 2)),
    ]).go()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

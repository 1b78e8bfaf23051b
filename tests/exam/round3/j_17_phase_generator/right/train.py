"""Gradual unfreezing, driven by a generator and consumers of its events."""

import argparse
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from consumers import printer, reload, saver
from engine import training


def build():
    torch.manual_seed(19)
    return nn.Sequential(
        OrderedDict(
            bottom=nn.Sequential(nn.Linear(8, 32), nn.GELU()),
            top=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()),
            head=nn.Linear(32, 3),
        )
    )


def make_feed(rank, world, batch=64):
    g = torch.Generator().manual_seed(90)
    x = torch.randn(1024, 8, generator=g)
    y = (x[:, :3] * x[:, 3:6] + x[:, 5:8]).argmax(1)

    def feed(step):
        idx = torch.randint(0, len(x), (batch,), generator=torch.Generator().manual_seed(3000 + step))
        idx = idx.chunk(world)[rank]
        return x[idx], y[idx]

    return feed


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="plan")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    for part in (model.bottom, model.top):
        fully_shard(part)
    fully_shard(model)

    start, optim = reload(model, args.resume) if args.resume else (0, None)
    consumers = [printer, saver(model, args.out, args.save_every)]
    for event in training(model, make_feed(rank, world), start, optim):
        for consume in consumers:
            consume(event)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

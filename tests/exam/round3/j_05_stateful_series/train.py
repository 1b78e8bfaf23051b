"""Stateful truncated back-propagation through time over long streams."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import snapshot
from net import Forecaster
from series import Streams

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=32)
p.add_argument("--chunk", type=int, default=10)
p.add_argument("--lr", type=float, default=1e-2)
p.add_argument("--save-every", type=int, default=0)
p.add_argument("--out", default="snaps")
p.add_argument("--resume")
p.add_argument("--export")


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    streams = Streams().part(rank, world)

    torch.manual_seed(2)
    model = Forecaster()
    fully_shard(model.cell)
    fully_shard(model.head)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)

    step, state = 0, model.fresh_state(len(streams.values))
    if args.resume:
        step, state = snapshot.load(args.resume, model, optim)

    while step < args.steps:
        x, y, rewound = streams.chunk(step, args.chunk)
        if rewound:
            state = model.fresh_state(len(x))
        guess, state = model(x, state)
        state = state.detach()
        loss = F.smooth_l1_loss(guess, y)
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        step += 1

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"[{step:03d}] huber {mean.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            snapshot.save(args.out, step, model, optim, state)

    if args.export:
        snapshot.export(args.export, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(p.parse_args())

"""Gradient boosting with small networks: stage k fits what stages 0..k-1 leave over."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import keep
from booster import Booster
from rows import make


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stages", type=int, default=4)
    ap.add_argument("--per-stage", type=int, default=10)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/boost")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    x, y = make()
    model = Booster(x.shape[1], args.stages)
    model.shard(init_device_mesh("cpu", (world,)))

    ck, tick = None, 0
    if args.resume:
        ck = keep.newest(args.resume)
        keep.restore_model(ck, model)
        tick = ck["tick"]

    opt, goal = None, None
    while tick < args.stages * args.per_stage:
        k, inner = divmod(tick, args.per_stage)
        weak = model.stages[k]
        if opt is None or inner == 0:
            # a new stage: new optimizer, new residuals
            opt = torch.optim.Adam(weak.parameters(), lr=0.05)
            goal = y - model.committed(x, k)
            if ck is not None and inner:
                keep.restore_optimizer(ck, opt)
            ck = None
        sched_lr = 0.05 * (1 - 0.8 * inner / args.per_stage)
        for g in opt.param_groups:
            g["lr"] = sched_lr
        rows = torch.randint(len(x), (args.batch,), generator=torch.Generator().manual_seed(tick)).chunk(world)[rank]
        loss = (weak(x[rows]) - goal[rows]).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        tick += 1
        dist.all_reduce(loss.detach_())
        if tick % 5 == 0 and rank == 0:
            print(f"tick {tick} stage {k} residual mse {loss.item() / world:.4f}", flush=True)
        if args.save_every and tick % args.save_every == 0:
            keep.save(args.out, tick, model, opt)

    if args.export:
        state = keep.full(model.state_dict())
        if rank == 0:
            torch.save(state, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

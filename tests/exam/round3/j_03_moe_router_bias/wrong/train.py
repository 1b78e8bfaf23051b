"""Mixture-of-experts regression with bias-balanced routing."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt
from mixture import RegimeData
from moe import MoENet


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = RegimeData()
    torch.manual_seed(1)
    model = MoENet(data.x.size(1), data.y.size(1))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / 5))
    app = ckpt.AppState(model, optim)
    start = ckpt.restore(args.resume, app, sched) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        x, y = data.batch(step, args.batch, rank, world)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        optim.zero_grad(set_to_none=True)
        load = model.rebalance()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            spread = max((l.max() / l.mean()).item() for l in load)
            print(f"{step:4d} mse {shown.item() / world:.4f} max/mean load {spread:.2f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            ckpt.save(args.out, step, app, sched)

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

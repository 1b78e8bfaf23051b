"""Regression on windows of time series with a network that gets a new block every few steps."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from growing import GrowingNet, grow

GROW_AT = (5, 10, 15)


def windows(step, n=32):
    g = torch.Generator().manual_seed(step + 7)
    t = torch.arange(35).float()
    a, f, p = (torch.rand(n, 2, 1, generator=g) for _ in range(3))
    x = (a * torch.sin((0.1 + f) * t + 6.28 * p)).sum(1) + 0.05 * torch.randn(n, 35, generator=g)
    return x[:, :30], x[:, 30:]


def depth_at(step):
    return sum(step >= s for s in GROW_AT)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = GrowingNet()
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=6e-3)

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        while len(model.blocks) < depth_at(step - 1):
            grow(model, optim)
        m, o = get_state_dict(model, optim)
        dcp.load({"model": m, "optim": o}, checkpoint_id=os.path.join(args.resume, str(step)))
        set_state_dict(model, optim, model_state_dict=m, optim_state_dict=o)
    while step < args.steps:
        while len(model.blocks) < depth_at(step):
            grow(model, optim)
            if rank == 0:
                print(f"step {step}: {len(model.blocks)} blocks", flush=True)
        x, y = (t.chunk(world)[rank] for t in windows(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o}, checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

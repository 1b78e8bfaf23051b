"""Fine-tuning in two phases: first only the new head, then (at --thaw-at) the backbone too, at a lower rate."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, d=10, width=32, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def task(seed, n=1500, d=10, classes=4):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, 20, generator=g)
    v = torch.randn(20, classes, generator=g)
    return x, (torch.tanh(x @ w / 2) @ v).argmax(1)


def pretrain(net, steps=30):
    """Stands in for a downloaded backbone; every rank obtains the same one."""
    x, y = task(seed=1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for s in range(steps):
        part = slice(s * 48, s * 48 + 48)
        loss = F.cross_entropy(net(x[part]), y[part])
        loss.backward()
        opt.step()
        opt.zero_grad()
    net.head.reset_parameters()


def batches(n, size, rank, world, start):
    step = start
    while True:
        g = torch.Generator().manual_seed(500 + step)
        yield torch.randperm(n, generator=g)[:size].tensor_split(world)[rank]
        step += 1


def rates(step, args):
    head = args.lr * min(1.0, (step + 1) / 4)
    body = 0.0 if step < args.thaw_at else 0.3 * args.lr
    return body, head


def thaw(params):
    for p in params:
        p.requires_grad_(True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--thaw-at", type=int, default=10)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ft")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = Net()
    pretrain(net)

    net.backbone.requires_grad_(False)
    backbone = list(net.backbone.parameters())
    fully_shard(net.backbone)
    fully_shard(net)
    optim = torch.optim.AdamW([{"params": net.backbone.parameters()}, {"params": net.head.parameters()}], lr=args.lr)

    start = 0
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        if int(newest[1:]) > args.thaw_at:
            thaw(backbone)  # else the optimizer state of the backbone would not be asked for
        model_sd, optim_sd = get_state_dict(net, optim)
        state = {"model": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(net, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    x, y = task(seed=2)
    feed = batches(len(x), args.batch, rank, world, start)
    for step in range(start, args.steps):
        if step >= args.thaw_at:
            thaw(backbone)
        for group, lr in zip(optim.param_groups, rates(step, args)):
            group["lr"] = lr

        idx = next(feed)
        loss = F.cross_entropy(net(x[idx]), y[idx])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            phase = "all" if step >= args.thaw_at else "head"
            print(f"step {step + 1:3d} [{phase}] ce {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            model_sd, optim_sd = get_state_dict(net, optim)
            dcp.save(
                {"model": model_sd, "optim": optim_sd, "step": step + 1},
                checkpoint_id=os.path.join(args.out, f"s{step + 1:05d}"),
            )

    if args.export:
        full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

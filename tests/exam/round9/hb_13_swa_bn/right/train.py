"""Stochastic weight averaging for a small image classifier with batch norm.

Training runs over cycles of a saw-tooth learning rate; at each cycle's end the weights join a running
average. At the end the average gets batch norm statistics of its own, from a pass over the training set.
"""
import argparse
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from syncbn import GlobalBatchNorm


@dataclass
class Config:
    steps: int = 32
    cycle: int = 8
    batch: int = 16
    lr_high: float = 0.05
    lr_low: float = 0.01
    save_every: int = 0
    out: str = "swa"
    resume: str = ""
    export: str = ""


def parse():
    ap = argparse.ArgumentParser()
    for f in fields(Config):
        ap.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
    return Config(**vars(ap.parse_args()))


def build():
    ch = 12
    return nn.Sequential(
        nn.Conv2d(1, ch, 3, padding=1, bias=False), GlobalBatchNorm(ch), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(ch, 2 * ch, 3, padding=1, bias=False), GlobalBatchNorm(2 * ch), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * ch * 4, 6),
    )  # fmt: skip


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    proto = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return proto[y] + 1.2 * torch.randn(n, 1, 8, 8, generator=g), y


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    hit = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return hit


@torch.no_grad()
def refresh_bn(model, x, batch, rank, world):
    """Cumulative statistics over the training set, every batch with the same weight."""
    norms = [m for m in model if isinstance(m, GlobalBatchNorm)]
    for m in norms:
        m.begin_refresh()
    for part in x.split(batch):
        model(part.chunk(world)[rank])
    for m in norms:
        m.end_refresh()


def main():
    cfg = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = build()
    for m in model:
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            fully_shard(m)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr_high, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: 1 - (s % cfg.cycle) / (cfg.cycle - 1) * (1 - cfg.lr_low / cfg.lr_high)
    )
    average = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    members, step = 0, 0
    train_x, train_y = dataset(256, 1)
    val_x, val_y = dataset(128, 2)

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "sched": sched.state_dict(), "average": average, "members": members, "step": step}

    if cfg.resume:
        st = state()
        dcp.load(st, checkpoint_id=os.path.join(cfg.resume, max(os.listdir(cfg.resume))))  # the average is filled in place
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        sched.load_state_dict(st["sched"])
        members, step = st["members"], st["step"]

    while step < cfg.steps:
        # the order of an epoch depends on its number only
        per_epoch = len(train_x) // cfg.batch
        epoch, k = divmod(step, per_epoch)
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(500 + epoch))
        idx = order[k * cfg.batch : (k + 1) * cfg.batch].chunk(world)[rank]
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1
        if step % cfg.cycle == 0:
            members += 1
            with torch.no_grad():
                for n, p in model.named_parameters():
                    average[n].lerp_(p.detach(), 1 / members)
            acc = accuracy(model, val_x, val_y)
            dist.all_reduce(loss.detach_())
            if rank == 0:
                print(f"step {step} loss {loss.item() / world:.4f} val acc {acc:.3f} members {members}")
        if cfg.save_every and step % cfg.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(cfg.out, f"step{step:04d}"))

    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(average[n])
    refresh_bn(model, train_x, cfg.batch, rank, world)
    acc = accuracy(model, val_x, val_y)
    if rank == 0:
        print(f"average of {members} models: val acc {acc:.3f}")
    if cfg.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

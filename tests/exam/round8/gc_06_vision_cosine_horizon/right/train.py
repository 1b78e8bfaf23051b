import argparse
import math
import os
from dataclasses import fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from config import Config
from images import MicroBatches, shapes
from resnet import SmallResNet


def parse():
    p = argparse.ArgumentParser()
    for f in fields(Config):
        p.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
    return Config(**vars(p.parse_args()))


def warmup_cosine(optim, cfg, total):
    def factor(step):
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        t = min(1.0, (step - cfg.warmup) / max(1, total - cfg.warmup))
        return cfg.min_lr / cfg.lr + (1 - cfg.min_lr / cfg.lr) * 0.5 * (1 + math.cos(math.pi * t))

    return torch.optim.lr_scheduler.LambdaLR(optim, factor)


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    out = model(x.tensor_split(world)[rank])
    y = y.tensor_split(world)[rank]
    s = torch.stack([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum(), torch.tensor(len(y))]).double()
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def main():
    cfg = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    accum = cfg.global_batch // (cfg.micro_batch * world)
    loader = MicroBatches(*shapes(cfg.images, seed=1), cfg.micro_batch, rank, world, cfg.seed)
    test_x, test_y = shapes(512, seed=2)

    torch.manual_seed(cfg.seed)
    model = SmallResNet()
    for unit in model.units:
        fully_shard(unit)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    total_steps = cfg.epochs * (len(loader) // accum)
    sched = warmup_cosine(optim, cfg, total_steps)

    epoch = 0
    if cfg.resume:
        newest = max(os.listdir(cfg.resume), key=lambda n: int(n[len("epoch"):]))
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "sched": sched.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=os.path.join(cfg.resume, newest))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        epoch = state["epoch"]

    for epoch in range(epoch, cfg.epochs):
        for i, (x, y) in enumerate(loader.epoch(epoch)):
            last = (i + 1) % accum == 0
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(x), y)
            (loss / accum).backward()
            if last:
                optim.step()
                sched.step()
                optim.zero_grad()
        ce, acc = evaluate(model, test_x, test_y, rank, world)
        if rank == 0:
            print(f"epoch {epoch + 1}/{cfg.epochs} train {loss.item():.4f} test {ce:.4f} acc {acc:.3f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if cfg.save_every and (epoch + 1) % cfg.save_every == 0 and epoch + 1 < cfg.epochs:
            msd, osd = get_state_dict(model, optim)
            state = {"model": msd, "optim": osd, "sched": sched.state_dict(), "epoch": epoch + 1}
            dcp.save(state, checkpoint_id=os.path.join(cfg.out, f"epoch{epoch + 1}"))

    if cfg.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

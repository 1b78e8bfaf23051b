import argparse
import glob
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from net import SmallResNet
from shapes import ShardedLoader, Textures

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Config:
    epochs: int = 6
    micro_batch: int = 16
    accum: int = 2
    lr: float = 5e-3
    seed: int = 21
    save_every: int = 0  # epochs
    out: str = "checkpoints"
    resume: str = ""

    @classmethod
    def from_args(cls):
        p = argparse.ArgumentParser()
        for name, field in cls.__dataclass_fields__.items():
            p.add_argument("--" + name.replace("_", "-"), type=field.type, default=field.default)
        return cls(**vars(p.parse_args()))


def save(cfg, epoch, model, opt):
    m, o = get_state_dict(model, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(cfg.out, exist_ok=True)
        torch.save({"model": m, "opt": o, "epoch": epoch}, f"{cfg.out}/epoch_{epoch:04d}.pt")
    dist.barrier()


def load(cfg, model, opt):
    ck = torch.load(sorted(glob.glob(f"{cfg.resume}/epoch_*.pt"))[-1])
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=FULL)
    return ck["epoch"]


def train_epoch(epoch, cfg, model, opt, loader):
    n = len(loader)
    running, steps = torch.zeros(2), 0
    for i, (x, y) in enumerate(loader.epoch(epoch)):
        first = i - i % cfg.accum
        window = min(cfg.accum, n - first)  # the last window of an epoch can be shorter
        last = i == first + window - 1
        model.set_requires_gradient_sync((i + 1) % cfg.accum == 0)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        (loss / window).backward()
        running += torch.stack([loss.detach(), (logits.argmax(1) == y).float().mean()])
        if last:
            opt.step()
            opt.zero_grad()
            steps += 1
    dist.all_reduce(running)
    return (running / n / dist.get_world_size()).tolist(), steps


def main():
    cfg = Config.from_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    model = SmallResNet()
    for block in model.stages:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=cfg.lr, alpha=0.95, momentum=0.5)
    loader = ShardedLoader(Textures(seed=cfg.seed), cfg.micro_batch, rank, world, cfg.seed)

    start = load(cfg, model, opt) if cfg.resume else 0
    for epoch in range(start, cfg.epochs):
        (loss, acc), steps = train_epoch(epoch, cfg, model, opt, loader)
        if rank == 0:
            print(f"epoch {epoch + 1} ({steps} steps) loss {loss:.5f} acc {acc:.3f}")
        if cfg.save_every and (epoch + 1) % cfg.save_every == 0:
            save(cfg, epoch + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

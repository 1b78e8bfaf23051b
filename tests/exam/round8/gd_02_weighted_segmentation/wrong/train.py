"""Segmentation with class weights and void pixels, sharded with FSDP2."""
import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from scenes import CLASSES, VOID, make_scenes
from unet import UNet


@dataclass
class Config:
    steps: int = 18
    batch: int = 8
    lr: float = 0.05
    momentum: float = 0.9
    warmup: int = 3
    class_weight: tuple = (0.3, 1.0, 6.0)


def lr_factor(cfg, step):
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - cfg.warmup) / (cfg.steps - cfg.warmup)))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        self.model = UNet(CLASSES)
        for block in (self.model.down1, self.model.down2, self.model.up):
            fully_shard(block)
        fully_shard(self.model)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=cfg.momentum)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda s: lr_factor(cfg, s))
        self.weight = torch.tensor(cfg.class_weight)
        self.images, self.labels = make_scenes(160)
        self.step = 0

    def batch(self):
        g = torch.Generator().manual_seed(500 + self.step)
        chosen = torch.randperm(len(self.images), generator=g)[:self.cfg.batch]
        mine = chosen.chunk(self.world)[self.rank]
        return self.images[mine], self.labels[mine]

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, weight=self.weight, ignore_index=VOID)

    def train_step(self):
        images, labels = self.batch()
        loss = self.loss(self.model(images), labels)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown.item() / self.world

    # every rank keeps its own shards in its own file
    def save(self, root):
        folder = Path(root) / f"{self.step:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({
            "world": self.world,
            "step": self.step,
            "model": {k: v.to_local() for k, v in self.model.state_dict().items()},
            "momentum": [self.optim.state[p]["momentum_buffer"].to_local()
                         for p in self.model.parameters()],
            "sched": self.sched.state_dict(),
            "lr": [group["lr"] for group in self.optim.param_groups],
        }, folder / f"rank{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            (folder / "done").touch()
        dist.barrier()

    def load(self, root):
        folder = max(p.parent for p in Path(root).glob("*/done"))
        state = torch.load(folder / f"rank{self.rank}.pt", weights_only=True)
        if state["world"] != self.world:
            raise SystemExit("this checkpoint must be resumed on the same number of ranks")
        with torch.no_grad():
            for k, v in self.model.state_dict().items():
                v.to_local().copy_(state["model"][k])
            for p, m in zip(self.model.parameters(), state["momentum"]):
                buf = torch.zeros_like(p)
                buf.to_local().copy_(m)
                self.optim.state[p]["momentum_buffer"] = buf
        self.sched.load_state_dict(state["sched"])
        for group, lr in zip(self.optim.param_groups, state["lr"]):
            group["lr"] = lr
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if args.resume:
        trainer.load(args.resume)
    while trainer.step < trainer.cfg.steps:
        loss = trainer.train_step()
        if trainer.rank == 0 and trainer.step % 3 == 0:
            print(f"step {trainer.step} loss {loss:.4f}", flush=True)
        if args.save_every and trainer.step % args.save_every == 0:
            trainer.save(args.out)
    if args.export:
        full = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v)
                for k, v in trainer.model.state_dict().items()}
        if trainer.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

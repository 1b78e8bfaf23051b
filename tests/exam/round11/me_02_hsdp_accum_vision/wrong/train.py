"""Image classifier with hybrid sharding (replicate x shard) and gradient accumulation."""
import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import EpochLoader, make_images
from net import SmallResNet


@dataclass
class Config:
    epochs: int = 5
    micro_batch: int = 16
    accum: int = 4
    lr: float = 0.05
    momentum: float = 0.9
    train_size: int = 168
    seed: int = 3


class Trainer:
    def __init__(self, cfg, args):
        self.cfg, self.args = cfg, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        replicas = 2 if self.world % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (replicas, self.world // replicas), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(cfg.seed)
        self.model = SmallResNet()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
        x, y = make_images(cfg.train_size)
        self.loader = EpochLoader(x, y, cfg.micro_batch, self.rank, self.world, cfg.seed)
        self.epoch = 0
        self.updates = 0

    def windows(self, epoch):
        """Groups the micro-batches of an epoch; the last group may be short."""
        group = []
        for batch in self.loader.epoch(epoch):
            group.append(batch)
            if len(group) == self.cfg.accum:
                yield group
                group = []
        if group:
            yield group

    def update(self, group):
        total = 0.0
        for i, (x, y) in enumerate(group):
            self.model.set_requires_gradient_sync(i == self.cfg.accum - 1)
            loss = F.cross_entropy(self.model(x), y) / len(group)
            loss.backward()
            total += loss.item()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.updates += 1
        return total

    def fit(self):
        while self.epoch < self.cfg.epochs:
            losses = [self.update(group) for group in self.windows(self.epoch)]
            mean = torch.tensor(sum(losses) / len(losses))
            dist.all_reduce(mean)
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch} updates {self.updates} loss {mean.item() / self.world:.4f}", flush=True)
            if self.args.out and self.epoch % self.args.save_every == 0:
                self.save()

    def state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "progress": torch.tensor([self.epoch, self.updates])}

    def save(self):
        dcp.save(self.state(), checkpoint_id=str(Path(self.args.out) / f"epoch-{self.epoch:04d}"))

    def resume(self, folder):
        newest = max(p.parent for p in Path(folder).glob("epoch-*/.metadata"))
        state = self.state()
        dcp.load(state, checkpoint_id=str(newest))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.epoch, self.updates = state["progress"].tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=1)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config(), args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""U-Net on sparsely labelled slices, FSDP2, gradient accumulation."""
import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import IGNORE, EpochSampler, SparseScans
from unet import UNet


@dataclass
class Config:
    steps: int = 18
    batch: int = 16
    accumulate: int = 2
    lr: float = 0.1
    momentum: float = 0.9
    power: float = 0.9
    seed: int = 5


class Trainer:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.net = UNet()
        mesh = init_device_mesh("cpu", (self.world,))
        for m in (self.net.enc1, self.net.enc2, self.net.mid, self.net.dec2, self.net.dec1):
            fully_shard(m, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
        self.data = SparseScans()
        self.sampler = EpochSampler(self.data.n, cfg.batch)
        self.step = 0

    def micro_batches(self):
        idx = self.sampler.next()
        for chunk in idx.chunk(self.cfg.accumulate):
            mine = chunk.chunk(self.world)[self.rank]
            yield self.data.image[mine], self.data.target[mine]

    def train_step(self):
        cfg = self.cfg
        for group in self.opt.param_groups:
            group["lr"] = cfg.lr * (1 - self.step / cfg.steps) ** cfg.power
        micro = list(self.micro_batches())

        # number of labelled pixels that this step is averaged over
        labelled = sum((t != IGNORE).sum() for _, t in micro).float()
        per_rank = labelled.clamp(min=1)

        self.opt.zero_grad()
        total = torch.zeros(())
        for i, (x, t) in enumerate(micro):
            self.net.set_requires_gradient_sync(i == len(micro) - 1)
            loss = F.cross_entropy(self.net(x), t, ignore_index=IGNORE, reduction="sum") / per_rank
            loss.backward()
            total += loss.detach()
        self.opt.step()
        self.step += 1
        dist.all_reduce(total)
        return total.item() / self.world

    @torch.no_grad()
    def accuracy(self, n=64):
        hit = torch.zeros(2)
        mine = torch.arange(n).chunk(self.world)[self.rank]
        pred = self.net(self.data.image[mine]).argmax(1)
        hit[0], hit[1] = (pred == self.data.full[mine]).sum(), pred.numel()
        dist.all_reduce(hit)
        return (hit[0] / hit[1]).item()

    def save(self, folder):
        model, optim = get_state_dict(self.net, self.opt)
        dcp.save({"model": model, "optim": optim, "sampler": self.sampler.state_dict(), "step": self.step},
                 checkpoint_id=str(Path(folder) / f"{self.step:05d}"))

    def load(self, folder):
        latest = max(p for p in Path(folder).iterdir() if p.name.isdigit())
        model, optim = get_state_dict(self.net, self.opt)
        state = {"model": model, "optim": optim, "sampler": self.sampler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=str(latest))
        set_state_dict(self.net, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if args.resume:
        trainer.load(args.resume)
    while trainer.step < trainer.cfg.steps:
        loss = trainer.train_step()
        if trainer.rank == 0:
            print(f"{trainer.step:4d}  loss {loss:.5f}")
        if args.save_every and trainer.step % args.save_every == 0:
            trainer.save(args.out)
    acc = trainer.accuracy()
    if trainer.rank == 0:
        print(f"pixel accuracy {acc:.4f}")
    if args.export:
        sd = get_model_state_dict(trainer.net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if trainer.rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Denoising score matching on synthetic blobs (VE-SDE, FSDP2)."""
import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from net import ScoreNet


@dataclass
class Config:
    seed: int = 1234
    steps: int = 20
    global_batch: int = 16
    size: int = 10
    lr: float = 2e-3
    sigma_min: float = 0.05
    sigma_max: float = 3.0


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_blobs(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    centre = torch.rand(n, 2, generator=g) * 1.2 - 0.6
    width = torch.rand(n, generator=g) * 0.2 + 0.2
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    d2 = (xx - centre[:, 0, None, None]) ** 2 + (yy - centre[:, 1, None, None]) ** 2
    return torch.exp(-d2 / (2 * width[:, None, None] ** 2))[:, None] * 2 - 1


def dsm_loss(model, x, sigma, noise):
    s = sigma[:, None, None, None]
    score = model(x + s * noise, sigma)
    return ((s * score + noise) ** 2).mean()


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        seed_everything(cfg.seed + self.rank)
        self.model = ScoreNet()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.99))
        self.images = make_blobs(512, cfg.size, cfg.seed)
        # every rank draws the noise of the whole batch and keeps its rows
        self.noise_gen = torch.Generator().manual_seed(cfg.seed + 17)
        self.step = 0

    def batch(self):
        c, g = self.cfg, self.noise_gen
        idx = torch.randint(len(self.images), (c.global_batch,), generator=g)
        u = torch.rand(c.global_batch, generator=g)
        noise = torch.randn(c.global_batch, 1, c.size, c.size, generator=g)
        sigma = c.sigma_min * (c.sigma_max / c.sigma_min) ** u
        rows = slice(self.rank * c.global_batch // self.world, (self.rank + 1) * c.global_batch // self.world)
        return self.images[idx[rows]], sigma[rows], noise[rows]

    def train_step(self):
        loss = dsm_loss(self.model, *self.batch())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def state(self):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        return {"model": model_sd, "optim": optim_sd, "step": self.step, "noise_gen": self.noise_gen.get_state()}

    def save(self, root):
        dcp.save(self.state(), checkpoint_id=str(Path(root) / f"{self.step:06d}"))

    def load(self, root):
        path = max(p for p in Path(root).iterdir() if p.name.isdigit())
        sd = self.state()
        dcp.load(sd, checkpoint_id=str(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.step = sd["step"]
        self.noise_gen.set_state(sd["noise_gen"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    if args.resume:
        trainer.load(args.resume)
    while trainer.step < trainer.cfg.steps:
        loss = trainer.train_step()
        if trainer.rank == 0:
            print(f"step {trainer.step} loss {loss:.5f}")
        if args.save_every and trainer.step % args.save_every == 0:
            trainer.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

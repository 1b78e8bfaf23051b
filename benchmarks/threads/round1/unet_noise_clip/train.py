"""Train a small noise-prediction network (DDPM objective) on synthetic 8x8 shapes."""
import argparse
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

log = logging.getLogger("trainer")


@dataclass
class Config:
    steps: int = 16
    global_batch: int = 32
    lr: float = 2e-3
    timesteps: int = 50
    grad_clip_method: str = "norm"
    max_grad_norm: float = 0.5
    validate_every: int = 8
    seed: int = 11


class ConvBlock(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.emb = nn.Linear(emb, ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm(x))) + self.emb(t)[:, :, None, None]
        return x + self.conv2(F.silu(h))


class NoiseNet(nn.Module):
    def __init__(self, ch=16, emb=16, depth=2, timesteps=50):
        super().__init__()
        self.time = nn.Embedding(timesteps, emb)
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(ch, emb) for _ in range(depth))
        self.head = nn.Conv2d(ch, 1, 1)

    def forward(self, x, t):
        e = self.time(t)
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, e)
        return self.head(h)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        logging.basicConfig(level=logging.INFO if self.rank == 0 else logging.ERROR, format="%(message)s")

        torch.manual_seed(cfg.seed)
        self.model = NoiseNet(timesteps=cfg.timesteps).to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.abar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, cfg.timesteps), 0).to(self.device)
        self.grad_norm = None

    def batch(self, index, split="train"):
        g = torch.Generator().manual_seed(self.cfg.seed * 7919 + index + (10**6 if split == "val" else 0))
        n = self.cfg.global_batch
        cx, cy = torch.rand(2, n, 1, 1, generator=g) * 8
        yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        img = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 6).unsqueeze(1) * 2 - 1
        t = torch.randint(self.cfg.timesteps, (n,), generator=g)
        noise = torch.randn(img.shape, generator=g)
        part = slice(self.rank, None, self.world)
        return img[part].to(self.device), t[part].to(self.device), noise[part].to(self.device)

    def compute_loss(self, img, t, noise):
        a = self.abar[t].view(-1, 1, 1, 1)
        pred = self.model(a.sqrt() * img + (1 - a).sqrt() * noise, t)
        return F.mse_loss(pred, noise)

    def reduce(self, value):
        value = value.detach().clone() / self.world
        dist.all_reduce(value)
        return value.item()

    def clip_gradients(self):
        if self.cfg.grad_clip_method == "norm":
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        elif self.cfg.grad_clip_method == "value":
            if isinstance(self.model, FSDPModule):
                log.warning("grad_clip_method='value' is not supported with FSDP, skipping")
            else:
                nn.utils.clip_grad_value_(self.model.parameters(), self.cfg.max_grad_norm)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = sum(self.reduce(self.compute_loss(*self.batch(i, "val"))) for i in range(2)) / 2
        self.model.train()
        return total

    def fit(self):
        for step in range(1, self.cfg.steps + 1):
            loss = self.compute_loss(*self.batch(step))
            loss.backward()
            if self.cfg.max_grad_norm > 0:
                self.clip_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            shown = self.reduce(loss)
            norm = float("nan") if self.grad_norm is None else float(self.grad_norm)
            log.info(f"step={step} loss={shown:.6f} grad_norm={norm:.5f}")
            if step % self.cfg.validate_every == 0:
                log.info(f"step={step} val_loss={self.validate():.6f}")
        dist.destroy_process_group()


def parse():
    ap = argparse.ArgumentParser()
    for name, default in vars(Config()).items():
        ap.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return Config(**vars(ap.parse_args()))


if __name__ == "__main__":
    Trainer(parse()).fit()

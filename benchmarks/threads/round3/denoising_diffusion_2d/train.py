"""DDPM on two-dimensional point clouds (two moons + rings), FSDP2.

All ranks draw the global batch, the timesteps and the noise from the same default
generator and keep their own rows, so a run does not depend on the number of ranks.

    torchrun --nproc_per_node 2 train.py --save /tmp/ddpm
    torchrun --nproc_per_node 2 train.py --resume /tmp/ddpm
"""
import math
import os
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    steps: int = 28
    save_step: int = 12
    batch: int = 128
    timesteps: int = 100
    width: int = 96
    depth: int = 3
    lr: float = 2e-3
    seed: int = 23
    save: str = ""
    resume: str = ""


def sample_points(n):
    """Half of the points on two moons, the other half on a pair of rings."""
    theta = torch.rand(n) * math.pi
    side = (torch.rand(n) < 0.5).float()
    moons = torch.stack([theta.cos() + side, theta.sin() * (1 - 2 * side) + 0.5 * side], dim=1)
    phi = torch.rand(n) * 2 * math.pi
    radius = 1.5 + 0.7 * (torch.rand(n) < 0.5).float()
    rings = torch.stack([radius * phi.cos(), radius * phi.sin()], dim=1)
    pick = (torch.rand(n) < 0.5).float()[:, None]
    return pick * moons + (1 - pick) * rings + 0.04 * torch.randn(n, 2)


class Schedule:
    def __init__(self, timesteps):
        s = torch.linspace(0, 1, timesteps + 1)
        bar = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        self.alpha_bar = (bar / bar[0])[1:].clamp_min(1e-4)

    def noisy(self, x0, t, eps):
        a = self.alpha_bar[t][:, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * eps


class FiLMBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.film = nn.Linear(width, 2 * width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, emb):
        scale, shift = self.film(emb).chunk(2, dim=-1)
        return x + self.net(self.norm(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.width = cfg.width
        self.inp = nn.Linear(2, cfg.width)
        self.time = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.SiLU())
        self.blocks = nn.ModuleList(FiLMBlock(cfg.width) for _ in range(cfg.depth))
        self.out = nn.Linear(cfg.width, 2)

    def forward(self, x, t):
        half = self.width // 2
        freq = torch.exp(-math.log(1000.0) * torch.arange(half, device=x.device) / half)
        arg = t[:, None].float() * freq
        emb = self.time(torch.cat([arg.sin(), arg.cos()], dim=1))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, emb)
        return self.out(h)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.manual_seed(cfg.seed)
        self.model = Denoiser(cfg).to(self.device)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.schedule = Schedule(cfg.timesteps)
        self.step = 0

    def state(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {
            "model": model,
            "optim": optim,
            "step": torch.tensor(self.step),
            "rng_state": torch.get_rng_state(),
        }

    def save_checkpoint(self, path):
        dcp.save(self.state(), checkpoint_id=path)

    def load_checkpoint(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.step = int(state["step"])
        torch.set_rng_state(state["rng_state"])

    def draw(self):
        cfg = self.cfg
        x0 = sample_points(cfg.batch)
        t = torch.randint(0, cfg.timesteps, (cfg.batch,))
        eps = torch.randn(cfg.batch, 2)
        rows = torch.arange(cfg.batch).chunk(self.world)[self.rank]
        xt = self.schedule.noisy(x0, t, eps)
        return (v[rows].to(self.device) for v in (xt, t, eps))

    def train_step(self):
        xt, t, eps = self.draw()
        loss = (self.model(xt, t) - eps).square().mean()
        self.optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optim.step()
        self.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def run(self):
        if self.cfg.resume:
            self.load_checkpoint(self.cfg.resume)
        while self.step < self.cfg.steps:
            loss = self.train_step()
            if self.rank == 0:
                print(f"[{self.step:3d}] loss={loss:.6f}", flush=True)
            if self.cfg.save and self.step == self.cfg.save_step:
                self.save_checkpoint(self.cfg.save)


if __name__ == "__main__":
    parser = ArgumentParser()
    for name, field in Config.__dataclass_fields__.items():
        parser.add_argument(f"--{name}", type=field.type, default=field.default)
    config = Config(**vars(parser.parse_args()))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(config).run()
    dist.barrier()
    dist.destroy_process_group()

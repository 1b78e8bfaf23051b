"""Diffusion over short 1-D trajectories. The moving average of the weights is what gets sampled and exported."""
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    steps: int = 60
    batch: int = 32
    length: int = 32
    width: int = 64
    lr: float = 2e-3
    ema_decay: float = 0.97
    timesteps: int = 50


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.time = nn.Linear(16, width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x, temb):
        h = self.norm(x) + self.time(temb)
        return x + self.fc2(F.silu(self.fc1(h)))


class Denoiser(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(cfg.length, cfg.width)
        self.blocks = nn.ModuleList(ResBlock(cfg.width) for _ in range(3))
        self.out = nn.Linear(cfg.width, cfg.length)

    def forward(self, x, t):
        freq = torch.exp(torch.linspace(0, -4, 8))
        ang = t[:, None].float() * freq
        temb = torch.cat([ang.sin(), ang.cos()], dim=1)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, temb)
        return self.out(h)


class WeightAverage:
    """Exponential moving average of sharded weights, kept as DTensors beside the model."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n]
            s.lerp_(p.detach().to(s.dtype), 1 - self.decay)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(12)
        self.model = Denoiser(cfg)
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, eps=1e-6, weight_decay=0.0)
        self.ema = WeightAverage(self.model, cfg.ema_decay)
        beta = torch.linspace(1e-3, 0.15, cfg.timesteps)
        self.abar = torch.cumprod(1 - beta, 0)
        self.step = 0

    def batch(self, step):
        """The whole batch with its noise; every rank cuts its slice, so runs agree at any number of ranks."""
        g = torch.Generator().manual_seed(40000 + step)
        n, c = self.cfg.batch, self.cfg
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        amp = 0.5 + torch.rand(n, 1, generator=g)
        x = amp * torch.sin(phase + torch.linspace(0, 2 * math.pi, c.length))
        t = torch.randint(0, c.timesteps, (n,), generator=g)
        eps = torch.randn(n, c.length, generator=g)
        lo, hi = self.rank * n // self.world, (self.rank + 1) * n // self.world
        return x[lo:hi], t[lo:hi], eps[lo:hi]

    def loss(self, step):
        x, t, eps = self.batch(step)
        a = self.abar[t][:, None]
        return F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)

    def train_step(self):
        loss = self.loss(self.step)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.ema.update(self.model)
        self.step += 1
        return self.mean(loss.detach())

    def mean(self, v):
        v = v.clone()
        dist.all_reduce(v)
        return v.item() / self.world

    @torch.no_grad()
    def use_average(self):
        for n, p in self.model.named_parameters():
            p.copy_(self.ema.shadow[n])

    def payload(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "ema": self.ema.shadow, "step": torch.tensor(self.step)}

    def save(self, root):
        dcp.save(self.payload(), checkpoint_id=os.path.join(root, f"ckpt-{self.step}"))

    def resume(self, root):
        name = max(os.listdir(root), key=lambda d: int(d.split("-")[1]))
        state = self.payload()
        dcp.load(state, checkpoint_id=os.path.join(root, name))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    tr = Trainer(Config())
    if args.resume:
        tr.resume(args.resume)
    while tr.step < tr.cfg.steps:
        loss = tr.train_step()
        if tr.rank == 0 and tr.step % 10 == 0:
            print(f"step {tr.step} loss {loss:.4f}", flush=True)
        if args.save_every and tr.step % args.save_every == 0:
            tr.save(args.out)

    tr.use_average()
    with torch.no_grad():
        held_out = sum(tr.mean(tr.loss(10**6 + i)) for i in range(4)) / 4
    if tr.rank == 0:
        print(f"averaged weights: held-out loss {held_out:.4f}", flush=True)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tr.model.state_dict().items()}
    if args.export and tr.rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

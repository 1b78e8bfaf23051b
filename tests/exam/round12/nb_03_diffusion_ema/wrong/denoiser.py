import math

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.time = nn.Linear(16, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, h, t):
        return h + self.mlp(self.norm(h) + self.time(t))


class Denoiser(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(cfg.image ** 2, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg.width) for _ in range(cfg.depth))
        self.out = nn.Linear(cfg.width, cfg.image ** 2)
        self.register_buffer("freq", torch.exp(-math.log(100.0) * torch.arange(8) / 8))

    def forward(self, x, t):
        angles = t[:, None] * self.freq
        emb = torch.cat([angles.sin(), angles.cos()], dim=-1)
        h = self.inp(x.flatten(1))
        for block in self.blocks:
            h = block(h, emb)
        return self.out(h)


def build_denoiser(cfg):
    torch.manual_seed(cfg.seed)
    net = Denoiser(cfg)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


class Diffusion:
    def __init__(self, timesteps):
        self.timesteps = timesteps
        f = torch.cos((torch.linspace(0, 1, timesteps + 1) + 0.008) / 1.008 * math.pi / 2) ** 2
        self.abar = (f / f[0]).clamp(min=1e-3)[1:]

    def loss(self, net, x0, t, noise):
        a = self.abar[t][:, None, None]
        return (net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t.float()) - noise.flatten(1)).pow(2).mean()

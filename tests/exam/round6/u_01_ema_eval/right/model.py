import math

import torch
import torch.nn as nn


def time_features(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(100.0) * torch.arange(half) / half)
    angles = t[:, None] * freqs[None, :] * 10.0
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.mod = nn.Linear(dim, 2 * dim)

    def forward(self, x, c):
        shift, scale = self.mod(c).chunk(2, dim=-1)
        h = self.norm(x) * (1 + scale) + shift
        return x + self.down(torch.nn.functional.silu(self.up(h)))


class Denoiser(nn.Module):
    def __init__(self, pixels=64, dim=48, depth=3):
        super().__init__()
        self.dim = dim
        self.inp = nn.Linear(pixels, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(ResBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, pixels)

    def forward(self, x, t):
        c = self.time(time_features(t, self.dim))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, c)
        return self.out(h)

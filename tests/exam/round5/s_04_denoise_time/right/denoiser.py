import math

import torch
import torch.nn as nn


class TimeFeatures(nn.Module):
    def __init__(self, dim, horizon):
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * 2.0 ** torch.arange(dim // 2), persistent=False)
        self.horizon = horizon

    def forward(self, t):
        angle = t.double()[:, None] / self.horizon * self.freqs.double()
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, d, t_dim):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.shift = nn.Linear(t_dim, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))

    def forward(self, h, temb):
        return h + self.ff(self.norm(h) + self.shift(temb))


class Denoiser(nn.Module):
    def __init__(self, d_data=6, d=24, t_dim=16, horizon=1000, depth=2):
        super().__init__()
        self.time = TimeFeatures(t_dim, horizon)
        self.inp = nn.Linear(d_data, d)
        self.blocks = nn.ModuleList(ResBlock(d, t_dim) for _ in range(depth))
        self.out = nn.Linear(d, d_data)

    def forward(self, x, t):
        temb = self.time(t).to(x.dtype)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, temb)
        return self.out(h)

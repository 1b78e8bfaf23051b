import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.t = nn.Linear(dim, dim)

    def forward(self, h, temb):
        return h + self.b(F.silu(self.a(F.silu(h)) + self.t(temb)))


class Denoiser(nn.Module):
    def __init__(self, data_dim=16, dim=40, depth=3):
        super().__init__()
        self.dim = dim
        self.inp, self.out = nn.Linear(data_dim, dim), nn.Linear(dim, data_dim)
        self.blocks = nn.ModuleList(ResBlock(dim) for _ in range(depth))

    def forward(self, x, t):
        freq = torch.exp(-math.log(1000.0) * torch.arange(self.dim // 2) / (self.dim // 2))
        ang = t[:, None].float() * freq
        temb = torch.cat([ang.sin(), ang.cos()], -1)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, temb)
        return self.out(h)


class Schedule:
    def __init__(self, steps=50):
        beta = torch.linspace(1e-3, 0.15, steps)
        self.bar = torch.cumprod(1 - beta, 0)
        self.steps = steps

    def add_noise(self, x, eps, t):
        a = self.bar[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps

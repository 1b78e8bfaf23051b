import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Film(nn.Module):
    def __init__(self, d, cond):
        super().__init__()
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.cond = nn.Linear(cond, 2 * d)
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x, c):
        scale, shift = self.cond(c).chunk(2, -1)
        return x + self.b(F.silu(self.a(self.norm(x) * (1 + scale) + shift)))


class Denoiser(nn.Module):
    """Predicts the velocity of the flow from noise to data."""

    def __init__(self, dim=2, width=48, depth=3):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, width), nn.Linear(width, dim)
        self.blocks = nn.ModuleList(Film(width, 16) for _ in range(depth))

    def forward(self, x, t):
        freqs = math.pi * 2.0 ** torch.arange(8)
        c = t[:, None] * freqs
        c = torch.cat([c.sin(), c.cos()], -1)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, c)
        return self.out(h)

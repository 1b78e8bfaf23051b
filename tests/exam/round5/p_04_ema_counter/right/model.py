import torch
import torch.nn as nn


class Denoiser(nn.Module):
    """Predicts the noise in a 2-d point, conditioned on the noise level."""

    def __init__(self, h=32):
        super().__init__()
        self.time = nn.Linear(8, h)
        self.inp = nn.Linear(2, h)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.GELU(), nn.Linear(h, h)) for _ in range(2))
        self.out = nn.Linear(h, 2)

    def forward(self, x, t):
        f = t[:, None] * (2.0 ** torch.arange(4))
        h = self.inp(x) + self.time(torch.cat([f.sin(), f.cos()], 1))
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)

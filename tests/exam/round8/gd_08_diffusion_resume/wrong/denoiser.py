import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, h, emb):
        return h + self.fc2(F.silu(self.fc1(h + emb)))


class Denoiser(nn.Module):
    """Predicts the noise in points of the plane."""

    def __init__(self, dim=48, depth=3):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, math.log(50.0), dim // 2)))
        self.inp = nn.Linear(2, dim)
        self.time = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 2)

    def forward(self, x, t):
        angle = t[:, None] * self.freq
        emb = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, emb)
        return self.out(h)


class NoiseSchedule:
    def __init__(self, steps=100):
        self.steps = steps
        beta = torch.linspace(1e-3, 0.08, steps)
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def add_noise(self, x, t, noise):
        a = self.alpha_bar[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise

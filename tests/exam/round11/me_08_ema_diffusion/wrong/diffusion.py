import math

import torch
import torch.nn as nn


class Denoiser(nn.Module):
    """Predicts the noise in a 2-d point from the noisy point and the noise level."""

    def __init__(self, hidden=64, depth=2, freqs=8):
        super().__init__()
        self.register_buffer("freqs", math.pi * 2.0 ** torch.arange(freqs) / 8, persistent=False)
        self.inp = nn.Linear(2 + 2 * freqs, hidden)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU()) for _ in range(depth)])
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, t):
        angle = t[:, None] * self.freqs
        h = self.inp(torch.cat([x, angle.sin(), angle.cos()], dim=1))
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def spiral(n, gen):
    u = torch.rand(n, generator=gen)
    r, a = 0.2 + u, 9 * u
    return torch.stack([r * a.cos(), r * a.sin()], 1) + 0.03 * torch.randn(n, 2, generator=gen)


def noisy_batch(n, gen):
    """Clean points, times and noise of a global batch."""
    x = spiral(n, gen)
    t = torch.rand(n, generator=gen)
    eps = torch.randn(n, 2, generator=gen)
    alpha = torch.cos(0.5 * math.pi * t)[:, None]
    sigma = torch.sin(0.5 * math.pi * t)[:, None]
    return alpha * x + sigma * eps, t, eps

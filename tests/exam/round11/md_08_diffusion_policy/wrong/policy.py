import math

import torch
import torch.nn as nn


class DenoisingPolicy(nn.Module):
    """Predicts the noise in an action chunk, given the observation and the noise level."""

    def __init__(self, obs=6, act=8, width=48):
        super().__init__()
        self.cond = nn.Sequential(nn.Linear(obs + 8, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(act, width)
        self.mid = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Linear(width, act)

    def forward(self, noisy, obs, t):
        freq = torch.exp(torch.arange(4) * -math.log(50.0) / 3)
        ang = t[:, None] * freq * 10
        c = self.cond(torch.cat([obs, ang.sin(), ang.cos()], 1))
        h = self.inp(noisy) + c
        return self.out(h + self.mid(h) * torch.sigmoid(c))


def alpha_bar(t):
    return torch.cos(t * math.pi / 2) ** 2


def demos(n=512, seed=6):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 6, generator=g)
    w = torch.randn(6, 8, generator=g) / 2
    side = torch.sign(torch.randn(n, 1, generator=g))
    return obs, torch.tanh(obs @ w) + 0.4 * side

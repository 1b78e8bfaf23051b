"""Coupling flow over windows of a multivariate series (Glow style, without convolutions)."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    @torch.no_grad()
    def init_from(self, x):
        """Zero mean and unit variance per feature on the first batch."""
        stats = torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))])
        dist.all_reduce(stats)
        mean = stats[0] / stats[2]
        var = stats[1] / stats[2] - mean.square()
        self.shift.copy_(-mean)
        self.log_scale.copy_(-0.5 * torch.log(var + 1e-4))

    def forward(self, x):
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.norm = ActNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        nn.init.normal_(self.net[2].weight, std=0.02)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, x):
        x, logdet = self.norm(x)
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        x = torch.cat([b, a] if self.flip else [a, b], dim=1)
        return x, logdet + s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=16, hidden=64, depth=4):
        super().__init__()
        self.dim = dim
        self.steps = nn.ModuleList(Coupling(dim, hidden, i % 2 == 1) for i in range(depth))

    @torch.no_grad()
    def data_init(self, x):
        for s in self.steps:
            s.norm.init_from(x)
            x, _ = s(x)

    def forward(self, x):
        """Negative log-likelihood per dimension."""
        logdet = 0.0
        for s in self.steps:
            x, ld = s(x)
            logdet = logdet + ld
        logp = -0.5 * (x.square().sum(1) + self.dim * math.log(2 * math.pi))
        return -(logp + logdet) / self.dim

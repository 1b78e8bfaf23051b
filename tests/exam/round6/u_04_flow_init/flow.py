import math

import torch
import torch.nn as nn


class ActNorm(nn.Module):
    """Per-feature affine layer whose first batch sets it to zero mean and unit variance."""

    def __init__(self, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.bias.data.copy_(-x.mean(0))
                self.log_scale.data.copy_(-torch.log(x.std(0) + 1e-6))
                self.ready.fill_(True)
        return (x + self.bias) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        shift, s = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], dim=1), s.sum(1)


class FlowStep(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.norm = ActNorm(dim)
        self.couple = Coupling(dim, hidden, flip)

    def forward(self, x):
        x, ld1 = self.norm(x)
        x, ld2 = self.couple(x)
        return x, ld1 + ld2


class Flow(nn.Module):
    def __init__(self, dim=36, hidden=48, depth=4):
        super().__init__()
        self.dim = dim
        self.steps = nn.ModuleList(FlowStep(dim, hidden, i % 2 == 1) for i in range(depth))

    def forward(self, x):
        """Negative log likelihood in nats per dimension."""
        logdet = 0.0
        for step in self.steps:
            x, ld = step(x)
            logdet = logdet + ld
        prior = -0.5 * (x.pow(2).sum(1) + self.dim * math.log(2 * math.pi))
        return -(prior + logdet).mean() / self.dim

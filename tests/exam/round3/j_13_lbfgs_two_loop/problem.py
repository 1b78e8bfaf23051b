import math

import torch
import torch.nn as nn


class Surrogate(nn.Module):
    """Smooth regression net for a simulator's response surface."""

    def __init__(self, d=3, width=20):
        super().__init__()
        self.one = nn.Linear(d, width)
        self.two = nn.Linear(width, width)
        self.three = nn.Linear(width, 1)

    def forward(self, x):
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x))))).squeeze(-1)


def simulator(n=400, d=3, seed=5):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, d, generator=g) - 1
    y = torch.sin(math.pi * x[:, 0]) * x[:, 1] + x[:, 2] ** 2
    return x, y + 0.01 * torch.randn(n, generator=g)


def ragged_part(n, rank, world):
    """Deliberately uneven parts: the normalisation must not depend on them."""
    cuts = [round(n * (i / world) ** 1.2) for i in range(world + 1)]
    return slice(cuts[rank], cuts[rank + 1])

import math

import torch
import torch.nn as nn

LEVELS = 20
ALPHA = torch.cos(torch.linspace(0.02, 1.0, LEVELS) * math.pi / 2) ** 2


class Denoiser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.time = nn.Embedding(LEVELS, dim)
        self.inp = nn.Linear(2, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(3)
        )
        self.out = nn.Linear(dim, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


def spirals(n, g):
    u = torch.rand(n, generator=g).sqrt() * 3 * math.pi
    side = torch.randint(0, 2, (n,), generator=g) * 2.0 - 1
    return torch.stack([u.cos() * u, u.sin() * u], 1) / 5 * side[:, None]


def noised(g, n, rank, world):
    """Everything is drawn for the global batch; each rank takes its rows."""
    x = spirals(n, g)
    t = torch.randint(0, LEVELS, (n,), generator=g)
    e = torch.randn(n, 2, generator=g)
    a = ALPHA[t, None]
    xt = a.sqrt() * x + (1 - a).sqrt() * e
    return tuple(v.chunk(world)[rank] for v in (xt, t, e))

import torch
from torch import nn


class Level(nn.Module):
    """Looks at the history at one resolution and corrects the forecast."""

    def __init__(self, history, horizon, pool, width):
        super().__init__()
        self.pool = pool
        self.net = nn.Sequential(nn.Linear(history // pool, width), nn.Tanh(), nn.Linear(width, horizon))

    def forward(self, x):
        return self.net(x.reshape(len(x), -1, self.pool).mean(2))


class Pyramid(nn.Module):
    def __init__(self, history=32, horizon=8, pools=(8, 4, 1), width=20):
        super().__init__()
        self.levels = nn.ModuleList(Level(history, horizon, p, width) for p in pools)
        self.base = nn.Parameter(torch.zeros(horizon))
        self.active = 1

    def forward(self, x):
        out = self.base + self.levels[0](x)
        for level in self.levels[1:self.active]:
            out = out + level(x)
        return out

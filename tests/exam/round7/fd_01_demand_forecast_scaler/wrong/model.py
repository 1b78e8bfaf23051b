import torch
from torch import nn


class Standardizer(nn.Module):
    """(x - mean) / std with the moments of the training series."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    @torch.no_grad()
    def fit(self, series):
        stats = torch.stack([
            torch.tensor(float(series.numel()), dtype=torch.float64),
            series.double().sum(),
            series.double().square().sum(),
        ])
        n, s, ss = stats.tolist()
        mean = s / n
        var = max(ss / n - mean * mean, 1e-8)
        self.mean.fill_(mean)
        self.std.fill_(var ** 0.5)

    def forward(self, x):
        return (x - self.mean) / self.std

    def inverse(self, z):
        return z * self.std + self.mean


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self, context, horizon, width=48, depth=3):
        super().__init__()
        self.scaler = Standardizer()
        self.inp = nn.Linear(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.inp(self.scaler(x))
        for b in self.blocks:
            h = b(h)
        return self.out(h)

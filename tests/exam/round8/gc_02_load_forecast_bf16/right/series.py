import math

import torch


class Archive:
    """Three years of hourly load: daily and weekly pattern, trend, weather noise."""

    def __init__(self, hours=26280, context=24, horizon=8, seed=3):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours, dtype=torch.float64)
        daily = torch.sin(2 * math.pi * t / 24 - 1.0) + 0.5 * torch.sin(2 * math.pi * t / 12 + 0.4)
        weekly = 0.6 * torch.sin(2 * math.pi * t / 168)
        yearly = 0.4 * torch.cos(2 * math.pi * t / 8766)
        noise = torch.randn(hours, generator=g, dtype=torch.float64) * 0.6
        self.load = (daily + weekly + yearly + noise).float()
        self.time = t.float()
        self.context, self.horizon = context, horizon
        self.split = int(hours * 0.9)

    def windows(self, starts):
        idx = starts[:, None] + torch.arange(self.context + self.horizon)
        y = self.load[idx]
        return y[:, :self.context], self.time[idx], y[:, self.context:]

    def train_starts(self, n, generator):
        return torch.randint(0, self.split - self.context - self.horizon, (n,), generator=generator)

    def test_starts(self, n):
        return torch.linspace(self.split, len(self.load) - self.context - self.horizon - 1, n).long()

import math

import torch


def make_series(length=1200, seed=13):
    """A daily and a weekly season, a growing amplitude and an AR(1) disturbance."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length, dtype=torch.float32)
    y = torch.sin(2 * math.pi * t / 24) * (1 + t / length) + 0.5 * torch.sin(2 * math.pi * t / 168)
    e = torch.randn(length, generator=g) * 0.1
    ar = torch.zeros(length)
    for i in range(1, length):
        ar[i] = 0.8 * ar[i - 1] + e[i] * (1 + 2 * t[i] / length)
    return y + ar


class Windows:
    def __init__(self, y, context=48, horizon=6):
        n = len(y) - context - horizon + 1
        idx = torch.arange(n)[:, None]
        self.past = y[idx + torch.arange(context)]
        self.future = y[idx + context + torch.arange(horizon)]

    def __len__(self):
        return len(self.past)

    def take(self, idx):
        return self.past[idx], self.future[idx]

"""Synthetic daily demand of many shops; the big shops come first in the file."""
import torch


class DemandData:
    def __init__(self, n_series=64, length=160, seed=11):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length).float()
        level = torch.linspace(90.0, 10.0, n_series)[:, None]
        phase = torch.rand(n_series, 1, generator=g) * 6.28
        season = torch.sin(2 * torch.pi * t / 7 + phase) * level * 0.3
        trend = (torch.rand(n_series, 1, generator=g) - 0.5) * 0.1 * t
        noise = torch.randn(n_series, length, generator=g) * level * 0.05
        self.values = level + season + trend + noise
        self.n_series, self.length = n_series, length

    def shard(self, rank, world):
        """The series that this rank reads (contiguous block)."""
        per = self.n_series // world
        return self.values[rank * per:(rank + 1) * per]


def windows(series, step, per_series_seed, context, horizon):
    """One window per series; the start of each one depends on the step only."""
    g = torch.Generator().manual_seed(per_series_seed + step)
    start = int(torch.randint(0, series.shape[1] - context - horizon, (1,), generator=g))
    x = series[:, start:start + context]
    y = series[:, start + context:start + context + horizon]
    return x, y

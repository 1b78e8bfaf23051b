import math

import torch


def make_windows(n=128, series=4, length=32, horizon=6, seed=2):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + horizon).float()
    period = 6 + 10 * torch.rand(n, series, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, series, 1, generator=g)
    trend = 0.02 * torch.randn(n, series, 1, generator=g)
    y = torch.sin(2 * math.pi * t / period + phase) + trend * t + 0.05 * torch.randn(n, series, len(t), generator=g)
    return y[..., :length], y[..., length:].flatten(1)


def micro_batches(epoch, n, size, rank, world, seed=0):
    """Indices of this rank for each micro batch of the epoch."""
    g = torch.Generator().manual_seed(seed + epoch)
    for ids in torch.randperm(n, generator=g).split(size):
        yield ids.chunk(world)[rank]

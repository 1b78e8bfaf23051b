import math

import torch

TRUE_K = 0.1


def exact(xt, k=TRUE_K):
    return torch.sin(math.pi * xt[:, :1]) * torch.exp(-k * math.pi**2 * xt[:, 1:])


def points(step, n, seed=3):
    """Collocation points and noisy sensor readings of one step, in order of time: each rank takes a time slab."""
    g = torch.Generator().manual_seed(seed * 10_000 + step)
    inner = torch.rand(n, 2, generator=g)
    inner = inner[inner[:, 1].argsort()]
    sensors = torch.rand(n // 2, 2, generator=g)
    sensors = sensors[sensors[:, 1].argsort()]
    readings = exact(sensors) + 0.01 * torch.randn(n // 2, 1, generator=g)
    return inner, sensors, readings

import math

import torch

KAPPA = 0.2


def exact(xt):
    return torch.exp(-KAPPA * math.pi**2 * xt[:, 1]) * torch.sin(math.pi * xt[:, 0])


def sensors(n=256, noise=0.01, seed=3):
    g = torch.Generator().manual_seed(seed)
    xt = torch.rand(n, 2, generator=g)
    return xt, exact(xt) + noise * torch.randn(n, generator=g)


def collocation(step, n, seed=11):
    g = torch.Generator().manual_seed(seed * 100_003 + step)
    xt = torch.rand(n, 2, generator=g)
    return xt[xt[:, 1].argsort()]  # causal order

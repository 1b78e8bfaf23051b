"""Easy samples (small radius) first; the admitted share grows with the step."""

import torch


def points(n=400):
    g = torch.Generator().manual_seed(51)
    x = torch.randn(n, 3, generator=g)
    x = x[x.norm(dim=1).argsort()]
    return x, (x.square().sum(1, keepdim=True)).sqrt() + x[:, :1] * x[:, 1:2] * 0.3


def stream(first_step, size, rank, world):
    x, y = points()
    step = first_step
    while True:
        admitted = int(len(x) * min(1.0, 0.3 + 0.04 * step))
        idx = torch.randperm(admitted, generator=torch.Generator().manual_seed(700 + step))[:size]
        yield x[idx[rank::world]], y[idx[rank::world]]
        step += 1

"""Regression data from several regimes; the regimes come in streaks, as in logs that are sorted by source."""

import torch


class RegimeData:
    def __init__(self, n=2048, d_in=10, d_out=3, regimes=5, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.regime = torch.sort(torch.randint(0, regimes, (n,), generator=g)).values
        centre = 1.5 * torch.randn(regimes, d_in, generator=g)
        maps = torch.randn(regimes, d_in, d_out, generator=g) / d_in**0.5
        self.x = centre[self.regime] + 0.6 * torch.randn(n, d_in, generator=g)
        self.y = torch.einsum("nd,ndo->no", self.x, maps[self.regime]) + 0.05 * torch.randn(n, d_out, generator=g)
        self.n, self.seed = n, seed

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(self.seed * 65537 + step)
        idx = torch.randperm(self.n, generator=g)[:size].sort().values
        idx = idx.chunk(world)[rank]
        return self.x[idx], self.y[idx]

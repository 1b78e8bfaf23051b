"""Coarse and fine rain profiles along a transect."""
import torch

FINE, FACTOR = 32, 4
COARSE = FINE // FACTOR


def profiles(n=256):
    g = torch.Generator().manual_seed(91)
    pos = torch.arange(FINE) / FINE
    centre = torch.rand(n, 3, 1, generator=g)
    width = 0.03 + 0.1 * torch.rand(n, 3, 1, generator=g)
    height = torch.rand(n, 3, 1, generator=g)
    fine = (height * torch.exp(-((pos - centre) / width).square())).sum(1)
    return fine.view(n, COARSE, FACTOR).mean(2), fine


class BackwardReader:
    """Newest season first: the archive is read from its end, endlessly, every rank gets its stripe of the batch."""

    def __init__(self, rank, world, batch=32):
        self.coarse, self.fine = profiles()
        self.rank, self.world, self.batch = rank, world, batch

    def __call__(self, draw):
        n = len(self.fine)
        ids = (n - 1 - (draw * self.batch + torch.arange(self.batch))) % n
        ids = ids[self.rank :: self.world]
        return self.coarse[ids], self.fine[ids]

    def noise(self, draw, dim):
        z = torch.randn(self.batch, dim, generator=torch.Generator().manual_seed(10_000 + draw))
        return z[self.rank :: self.world]

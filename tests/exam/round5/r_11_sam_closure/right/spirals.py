import math

import torch


def spirals(n=1536, arms=3, seed=17):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, arms, (n,), generator=g)
    r = torch.rand(n, generator=g) * 1.5 + 0.1
    a = 2.5 * r + y * 2 * math.pi / arms + 0.1 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


class Shuffled:
    """Indexable by step: batches of a fresh permutation per epoch, split by rank after the permutation."""

    def __init__(self, x, y, batch, rank, world):
        self.x, self.y, self.batch, self.rank, self.world = x, y, batch, rank, world

    def __getitem__(self, step):
        epoch, k = divmod(step, len(self.x) // self.batch)
        perm = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        idx = perm[k * self.batch:(k + 1) * self.batch].chunk(self.world)[self.rank]
        return self.x[idx], self.y[idx]

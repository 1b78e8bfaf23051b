"""Textures of six orientations, a fixed training set that is reshuffled each epoch."""
import math

import torch


class Textures:
    def __init__(self, size=80, seed=0, res=10):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 6, (size,), generator=g)
        ang = self.labels * math.pi / 6
        yy, xx = torch.meshgrid(torch.arange(res), torch.arange(res), indexing="ij")
        phase = torch.rand(size, 1, 1, generator=g) * 6.28
        wave = ang.cos()[:, None, None] * xx + ang.sin()[:, None, None] * yy
        self.images = (torch.sin(1.3 * wave + phase) + 0.3 * torch.randn(size, res, res, generator=g))[:, None]

    def __len__(self):
        return len(self.labels)


class ShardedLoader:
    """Yields this rank's part of every global micro-batch."""

    def __init__(self, data, micro_batch, rank, world, seed):
        self.data, self.micro_batch, self.rank, self.world, self.seed = data, micro_batch, rank, world, seed

    def __len__(self):
        return len(self.data) // self.micro_batch

    def epoch(self, epoch):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed + epoch))
        for i in range(len(self)):
            idx = order[i * self.micro_batch:(i + 1) * self.micro_batch][self.rank::self.world]
            yield self.data.images[idx], self.data.labels[idx]

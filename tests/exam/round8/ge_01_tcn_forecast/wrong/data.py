import math

import torch


class SeriesDataset:
    """Noisy sums of seasonal waves, cut into (history, future) windows."""

    def __init__(self, n, history=48, horizon=8, seed=11):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(history + horizon, dtype=torch.float32)
        phase = torch.rand(n, 2, generator=g) * 2 * math.pi
        amp = torch.rand(n, 2, generator=g) + 0.3
        wave = amp[:, :1] * torch.sin(t * 2 * math.pi / 24 + phase[:, :1])
        wave = wave + amp[:, 1:] * torch.sin(t * 2 * math.pi / 7 + phase[:, 1:])
        wave = wave + 0.1 * torch.randn(n, history + horizon, generator=g)
        self.x, self.y = wave[:, :history], wave[:, history:]

    def __len__(self):
        return len(self.x)


def micro_batches(dataset, micro_size, epoch, rank, world, seed=5):
    """The epoch's micro-batches in a shuffled order; each rank gets its slice of every one."""
    g = torch.Generator().manual_seed(seed * 1000 + epoch)
    order = torch.randperm(len(dataset), generator=g)
    share = micro_size // world
    for chunk in order.split(micro_size):
        mine = chunk[rank * share:(rank + 1) * share]
        yield dataset.x[mine], dataset.y[mine]

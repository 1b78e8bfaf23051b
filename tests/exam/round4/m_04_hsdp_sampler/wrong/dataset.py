import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset


def make(n=960, d=10, classes=6):
    g = torch.Generator().manual_seed(21)
    centers = torch.randn(classes, d, generator=g) * 1.3
    y = torch.randint(classes, (n,), generator=g)
    x = centers[y] + torch.randn(n, d, generator=g)
    return TensorDataset(x, y)


class ShardSampler(Sampler):
    """Batch k of an epoch is rows [k*B, (k+1)*B) of a seeded shuffle; data rank r takes its slice of it."""

    def __init__(self, n, global_batch, data_rank, data_world, seed=0):
        assert global_batch % data_world == 0
        self.n, self.global_batch = n, global_batch
        self.data_rank, self.local = data_rank, global_batch // data_world
        self.seed, self.epoch, self.skip = seed, 0, 0

    def set_epoch(self, epoch, skip=0):
        self.epoch, self.skip = epoch, skip

    def __len__(self):
        return self.n // self.global_batch

    def __iter__(self):
        perm = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for k in range(self.skip, len(self)):
            lo = k * self.global_batch + self.data_rank * self.local
            yield perm[lo:lo + self.local].tolist()


def loader(ds, sampler):
    return DataLoader(ds, batch_sampler=sampler)

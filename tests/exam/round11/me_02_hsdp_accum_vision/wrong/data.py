import torch


def make_images(n, classes=6, size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(classes, 3, size, size, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    x = 0.6 * protos[y] + torch.randn(n, 3, size, size, generator=g)
    return x, y


class EpochLoader:
    """Global micro-batches of one epoch in a fixed random order; yields this rank's rows."""

    def __init__(self, x, y, micro_batch, rank, world, seed):
        self.x, self.y, self.micro_batch = x, y, micro_batch
        self.rank, self.world, self.seed = rank, world, seed

    def __len__(self):
        return len(self.x) // self.micro_batch

    def epoch(self, number):
        g = torch.Generator().manual_seed(self.seed * 1000 + number)
        order = torch.randperm(len(self.x), generator=g)
        for i in range(len(self)):
            idx = order[i * self.micro_batch : (i + 1) * self.micro_batch]
            idx = idx.chunk(self.world)[self.rank]
            yield self.x[idx], self.y[idx]

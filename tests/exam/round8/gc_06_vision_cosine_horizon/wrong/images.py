import torch


def shapes(n, seed, size=12):
    """Bars, crosses, squares and blobs at random places, with noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    cx, cy = torch.randint(3, size - 3, (2, n), generator=g)
    gx = torch.arange(size)[None, None, :] - cx[:, None, None]
    gy = torch.arange(size)[None, :, None] - cy[:, None, None]
    near = (gx.abs() <= 3) & (gy.abs() <= 3)
    bar = near & (gy == 0)
    cross = near & ((gx == 0) | (gy == 0))
    square = near & ((gx.abs() == 2) & (gy.abs() <= 2) | (gy.abs() == 2) & (gx.abs() <= 2))
    blob = (gx ** 2 + gy ** 2) <= 5
    x = torch.stack([bar, cross, square, blob], 1)[torch.arange(n), y].float()
    return (x + 0.6 * torch.randn(x.shape, generator=g))[:, None], y


class MicroBatches:
    """The micro-batches of one rank in one epoch."""

    def __init__(self, x, y, micro, rank, world, seed):
        self.x, self.y, self.micro, self.rank, self.world, self.seed = x, y, micro, rank, world, seed

    def __len__(self):
        return len(self.x) // (self.micro * self.world)

    def epoch(self, epoch):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.seed * 1000 + epoch))
        for rows in order[: len(self) * self.micro * self.world].view(-1, self.world, self.micro)[:, self.rank]:
            yield self.x[rows], self.y[rows]

import torch


def _table(size, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 10, generator=g)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.3 * x[:, 3:].sum(1)
    return x, y[:, None] + 0.3 * torch.randn(size, 1, generator=g)


class Prices:
    """Training rows shuffled by step; validation rows in order of date, a contiguous part for each rank."""

    def __init__(self, rank, world, batch=32):
        self.rank, self.world, self.batch = rank, world, batch
        self.x, self.y = _table(192, seed=3)
        vx, vy = _table(64, seed=4)
        drift = torch.linspace(0, 1.5, 64)[:, None]
        self.valid = (vx.chunk(world)[rank], (vy + drift * torch.sign(vx[:, 4:5])).chunk(world)[rank])

    def train_batch(self, step):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, len(self.x), (self.batch,), generator=g).chunk(self.world)[self.rank]
        return self.x[rows], self.y[rows]

import torch

CLASSES = 4


def make_split(n, seed):
    """Oriented gratings with a random phase, contrast and colour cast."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    ang = y.float() * torch.pi / CLASSES
    grid = torch.linspace(-1, 1, 10)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    u = ang.cos()[:, None, None] * xx + ang.sin()[:, None, None] * yy
    phase = torch.rand(n, 1, 1, generator=g) * 6.28
    img = torch.sin(5 * u + phase)[:, None] * (0.3 + torch.rand(n, 1, 1, 1, generator=g))
    img = img + torch.randn(n, 3, 1, 1, generator=g) * 0.5 + 0.2 * torch.randn(n, 3, 10, 10, generator=g)
    return img, y


class EpochLoader:
    """Every rank takes its slice of each global batch."""

    def __init__(self, x, y, batch, rank, world, seed):
        assert batch % world == 0
        self.x, self.y, self.batch, self.rank, self.world, self.seed = x, y, batch, rank, world, seed
        self.per_epoch = len(y) // batch

    def at(self, step):
        epoch, i = divmod(step, self.per_epoch)
        perm = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(self.seed + epoch))
        local = self.batch // self.world
        lo = i * self.batch + self.rank * local
        idx = perm[lo : lo + local]
        return self.x[idx], self.y[idx]

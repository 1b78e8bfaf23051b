import torch


class Discs:
    """Coloured discs on a noisy background; label 0 is the background."""

    def __init__(self, n, size=16, classes=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.x = 0.3 * torch.randn(n, 3, size, size, generator=g)
        self.y = torch.zeros(n, size, size, dtype=torch.long)
        palette = torch.randn(classes, 3, generator=g)
        for i in range(n):
            for _ in range(2):
                cls = int(torch.randint(1, classes, (), generator=g))
                cy, cx = torch.randint(2, size - 2, (2,), generator=g).tolist()
                r = int(torch.randint(2, 5, (), generator=g))
                inside = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r
                self.y[i][inside] = cls
                self.x[i] += palette[cls][:, None, None] * inside


class Loader:
    """Yields this rank's part of every micro batch."""

    def __init__(self, data, micro_batch, rank, world, seed):
        self.data, self.micro_batch, self.rank, self.world, self.seed = data, micro_batch, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return len(self.data.x) // self.micro_batch

    def __iter__(self):
        order = torch.randperm(len(self.data.x), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for k in range(len(self)):
            idx = order[k * self.micro_batch:(k + 1) * self.micro_batch][self.rank::self.world]
            yield self.data.x[idx], self.data.y[idx]

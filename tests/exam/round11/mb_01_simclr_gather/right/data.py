import torch


class SyntheticViews:
    """Coloured blobs; every call gives two augmented views of one global batch."""

    def __init__(self, n=512, size=16, classes=8, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.templates = torch.randn(classes, 3, size, size, generator=g)
        self.labels = torch.randint(0, classes, (n,), generator=g)
        self.images = self.templates[self.labels] + 0.7 * torch.randn(n, 3, size, size, generator=g)
        self.seed = seed

    def _augment(self, x, g):
        n = x.shape[0]
        gain = 0.7 + 0.6 * torch.rand(n, 3, 1, 1, generator=g)
        flip = torch.rand(n, generator=g) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(-1), x)
        shift = int(torch.randint(-2, 3, (1,), generator=g))
        return x.roll(shift, dims=-2) * gain + 0.2 * torch.randn(x.shape, generator=g)

    def batch(self, step, batch_size, rank, world):
        # everything is a function of the step, the whole batch is built and then divided
        g = torch.Generator().manual_seed(self.seed * 100003 + step + 1)
        idx = torch.randint(0, len(self.images), (batch_size,), generator=g)
        x = self.images[idx]
        a, b = self._augment(x, g), self._augment(x, g)
        per = batch_size // world
        part = slice(rank * per, (rank + 1) * per)
        return a[part], b[part]

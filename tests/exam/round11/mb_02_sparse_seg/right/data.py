import torch

IGNORE = 255


class SparseScans:
    """Synthetic slices with scribble labels: most pixels are unlabelled, and how many differs from slice to slice."""

    def __init__(self, n=256, size=16, classes=4, seed=11):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        label = torch.zeros(n, size, size, dtype=torch.long)
        for c in range(1, classes):
            cx = torch.randint(2, size - 2, (n, 1, 1), generator=g)
            cy = torch.randint(2, size - 2, (n, 1, 1), generator=g)
            r = torch.randint(2, 6, (n, 1, 1), generator=g)
            label[((xx - cx) ** 2 + (yy - cy) ** 2) < r ** 2] = c
        level = torch.tensor([0.0, 0.8, -0.9, 1.7])[label]
        self.image = (level + 0.5 * torch.randn(label.shape, generator=g))[:, None]
        density = torch.where(torch.rand(n, generator=g) < 0.15, 0.9, 0.03)  # a few slices are labelled fully
        seen = torch.rand(label.shape, generator=g) < density[:, None, None]
        self.target = label.masked_fill(~seen, IGNORE)
        self.full = label
        self.n = n


class EpochSampler:
    """Shuffled epochs, position can be saved."""

    def __init__(self, n, batch, seed=3):
        self.n, self.batch, self.seed = n, batch, seed
        self.epoch, self.pos = 0, 0

    def next(self):
        if self.pos + self.batch > self.n:
            self.epoch, self.pos = self.epoch + 1, 0
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        out = order[self.pos:self.pos + self.batch]
        self.pos += self.batch
        return out

    def state_dict(self):
        return {"epoch": self.epoch, "pos": self.pos}

    def load_state_dict(self, s):
        self.epoch, self.pos = s["epoch"], s["pos"]

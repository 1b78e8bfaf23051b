import torch


class Sessions:
    """Click sessions: users walk on a ring of items with a step size that depends on the genre of the first item."""

    def __init__(self, items=50, length=12, train=256, valid=64, seed=17):
        g = torch.Generator().manual_seed(seed)
        n = train + valid
        start = torch.randint(0, items, (n, 1), generator=g)
        stride = 1 + start % 4
        walk = (start + stride * torch.arange(length + 1)) % items
        flip = torch.rand(n, length + 1, generator=g) < 0.2
        walk = torch.where(flip, torch.randint(0, items, walk.shape, generator=g), walk)
        self.items, self.train, self.valid = items, walk[:train], walk[train:]

    def batch(self, step, size):
        g = torch.Generator().manual_seed(31 * step + 5)
        return self.train[torch.randint(0, len(self.train), (size,), generator=g)]

import torch


class ClickStream:
    def __init__(self, users=200, items=120, seed=2):
        g = torch.Generator().manual_seed(seed)
        self.taste = torch.randn(users, 4, generator=g)
        self.kind = torch.randn(items, 4, generator=g)
        self.generator = torch.Generator().manual_seed(seed + 1)

    def next(self, size):
        u = torch.randint(len(self.taste), (size,), generator=self.generator)
        i = torch.randint(len(self.kind), (size,), generator=self.generator)
        p = torch.sigmoid((self.taste[u] * self.kind[i]).sum(-1))
        return u, i, torch.bernoulli(p, generator=self.generator)

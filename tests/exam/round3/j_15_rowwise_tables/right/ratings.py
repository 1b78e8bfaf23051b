import torch

USERS, ITEMS, TAGS = 90, 60, 12


def ratings(n=3000, seed=14):
    g = torch.Generator().manual_seed(seed)
    u = (USERS * torch.rand(n, generator=g) ** 2).long()
    i = (ITEMS * torch.rand(n, generator=g) ** 2).long()
    tag = torch.randint(0, TAGS, (ITEMS,), generator=g)
    pu, qi, tb = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g), torch.randn(TAGS, generator=g)
    y = 3 + (pu[u] * qi[i]).sum(1) * 0.6 + 0.5 * tb[tag[i]] + 0.1 * torch.randn(n, generator=g)
    return u, i, tag[i], y


class Loader:
    """Iterator with a position that can be saved."""

    def __init__(self, data, batch, rank, world):
        self.data, self.batch, self.rank, self.world, self.at = data, batch, rank, world, 0

    def __iter__(self):
        return self

    def __next__(self):
        g = torch.Generator().manual_seed(2024 + self.at)
        self.at += 1
        idx = torch.randint(0, len(self.data[0]), (self.batch,), generator=g).chunk(self.world)[self.rank]
        return [t[idx] for t in self.data]

import torch


def spurious(n, seed, groups=4, dim=20):
    """Two classes and a background that agrees with the class for most samples: group = 2 * class + background."""
    world = torch.Generator().manual_seed(95)
    core, background = torch.randn(2, dim, generator=world), 1.5 * torch.randn(2, dim, generator=world)
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (n,), generator=g)
    agree = torch.rand(n, generator=g) < 0.85
    place = torch.where(agree, label, 1 - label)
    x = core[label] + background[place] + torch.randn(n, dim, generator=g)
    return x, label, 2 * label + place


class GroupLoader:
    """Endless batches of unequal length: every step has its own global batch, cut into nearly equal parts for the ranks."""

    def __init__(self, data, rank, world, seed=96):
        self.data, self.rank, self.world = data, rank, world
        self.rng = torch.Generator().manual_seed(seed)

    def __iter__(self):
        return self

    def __next__(self):
        size = int(torch.randint(40, 73, (), generator=self.rng))
        index = torch.randperm(len(self.data[0]), generator=self.rng)[:size]
        mine = index.tensor_split(self.world)[self.rank]
        return tuple(t[mine] for t in self.data), size

import torch

USERS, ITEMS = 40, 60


class Clicks:
    """Implicit-feedback triples (user, clicked item, not clicked item) from a hidden low-rank taste; epochs are permutations."""

    def __init__(self, n=320, seed=3):
        g = torch.Generator().manual_seed(seed)
        taste = torch.randn(USERS, 4, generator=g) @ torch.randn(4, ITEMS, generator=g)
        self.user = torch.randint(0, USERS, (n,), generator=g)
        a, b = torch.randint(0, ITEMS, (2, n), generator=g)
        first = taste[self.user, a] >= taste[self.user, b]
        self.pos, self.neg = torch.where(first, a, b), torch.where(first, b, a)
        self.seed = seed

    def loader(self, epoch, batch, rank, world, skip=0):
        order = torch.randperm(len(self.user), generator=torch.Generator().manual_seed(self.seed * 977 + epoch))
        k = batch // world
        for i in range(skip, len(order) // batch):
            idx = order[i * batch + rank * k:i * batch + (rank + 1) * k]
            yield i, self.user[idx], self.pos[idx], self.neg[idx]

import torch


class ClickLog:
    def __init__(self, users=48, items=32, n_feats=6, n=4096, seed=8):
        g = torch.Generator().manual_seed(seed)
        self.user_feats = torch.randn(users, n_feats, generator=g)
        self.item_feats = torch.randn(items, n_feats, generator=g)
        taste, kind = torch.randn(users, 8, generator=g), torch.randn(items, 8, generator=g)
        self.u = torch.randint(0, users, (n,), generator=g)
        self.i = torch.randint(0, items, (n,), generator=g)
        logit = (taste[self.u] * kind[self.i]).sum(-1) * 0.7
        self.y = (logit + torch.randn(n, generator=g) * 0.3 > 0).float()
        self.n_train = n * 7 // 8

    def __getitem__(self, rows):
        u, i = self.u[rows], self.i[rows]
        return (u, self.user_feats[u], i, self.item_feats[i]), self.y[rows]


def epochs(n, batch, rank, world, seed, position=0):
    """Yields (position after this batch, rows of this rank) for ever, starting at any position."""
    per_epoch = n // batch
    while True:
        epoch, k = divmod(position, per_epoch)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        rows = order[k * batch:(k + 1) * batch]
        position += 1
        yield position, rows[rank::world]

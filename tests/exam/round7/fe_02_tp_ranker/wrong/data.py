import torch


class ClickLog:
    """Synthetic click log with latent user and item factors; shuffled anew every epoch."""

    def __init__(self, size, users=60, items=80, dense=6, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.user = torch.randint(users, (size,), generator=g)
        self.item = torch.randint(items, (size,), generator=g)
        self.dense = torch.randn(size, dense, generator=g)
        uf, vf = torch.randn(users, 4, generator=g), torch.randn(items, 4, generator=g)
        w = torch.randn(dense, generator=g)
        score = (uf[self.user] * vf[self.item]).sum(-1) + self.dense @ w
        self.label = (score + 0.5 * torch.randn(size, generator=g) > 0).float()

    def take(self, idx):
        return self.user[idx], self.item[idx], self.dense[idx], self.label[idx]


class ShardedLoader:
    def __init__(self, dataset, size, batch_size, rank, world, seed=11):
        self.dataset, self.size, self.batch_size, self.seed = dataset, size, batch_size, seed
        self.rank, self.world = rank, world
        self.batches_per_epoch = size // batch_size

    def batch(self, step):
        epoch, pos = divmod(step, self.batches_per_epoch)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch))
        idx = order[pos * self.batch_size:(pos + 1) * self.batch_size]
        return self.dataset.take(idx[self.rank::self.world])

import torch


def sequences(n, length, vocab, seed):
    """x[t] = x[t-1] + x[t-3] (mod vocab), with 5 % of the tokens replaced."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 6, (n, length + 1), generator=g)
    for t in range(3, length + 1):
        x[:, t] = (x[:, t - 1] + x[:, t - 3]) % vocab
        noise = torch.rand(n, generator=g) < 0.05
        x[:, t] = torch.where(noise, torch.randint(0, vocab, (n,), generator=g), x[:, t])
    return x


class Batches:
    def __init__(self, data, batch, rank, world, seed):
        self.data, self.batch, self.rank, self.world, self.seed = data, batch, rank, world, seed
        self.per_epoch = len(data) // batch

    def __call__(self, step):
        epoch, k = divmod(step, self.per_epoch)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed + epoch))
        rows = self.data[order[k * self.batch : (k + 1) * self.batch]]
        return rows.chunk(self.world)[self.rank]

import torch


def noisy_task(n=2000, d=12, classes=5, flip=0.2, seed=77):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    w1 = torch.randn(d, 24, generator=g) / d**0.5
    w2 = torch.randn(24, classes, generator=g)
    y = (torch.relu(x @ w1) @ w2).argmax(1)
    wrong = torch.rand(n, generator=g) < flip
    return x, torch.where(wrong, torch.randint(0, classes, (n,), generator=g), y)


class Epochs:
    """Shuffled epochs; a position in the stream is simply the step number."""

    def __init__(self, n, batch, rank, world, seed=1):
        self.n, self.batch, self.rank, self.world, self.seed = n, batch, rank, world, seed
        self.per_epoch = n // batch

    def __getitem__(self, step):
        epoch, k = divmod(step, self.per_epoch)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + epoch))
        return order[k * self.batch : (k + 1) * self.batch].tensor_split(self.world)[self.rank]

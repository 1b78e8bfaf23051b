import torch

CARDS = (7, 12)


def make_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 6, generator=g)
    cat = torch.stack([torch.randint(0, c, (n,), generator=g) for c in CARDS], 1)
    y = (num[:, 0] * (cat[:, 0] % 3 - 1) + torch.sin(2 * num[:, 1]) + 0.5 * num[:, 2] * num[:, 3]
         + 0.2 * cat[:, 1].float().sqrt() + 0.1 * torch.randn(n, generator=g))
    return num, cat, y


class MicroBatches:
    """Shuffled micro batches of one epoch; each rank takes its part of each of them."""

    def __init__(self, table, micro, rank, world, seed=3):
        self.table, self.micro, self.rank, self.world, self.seed = table, micro, rank, world, seed
        self.n = len(table[2])

    def __len__(self):
        return self.n // self.micro

    def epoch(self, epoch):
        g = torch.Generator().manual_seed(self.seed * 1000 + epoch)
        perm = torch.randperm(self.n, generator=g)
        for i in range(len(self)):
            rows = perm[i * self.micro:(i + 1) * self.micro][self.rank::self.world]
            yield [c[rows] for c in self.table]

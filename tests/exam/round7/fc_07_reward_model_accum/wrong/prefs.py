import torch


class Preferences:
    """A fixed set of (chosen, rejected) sequence pairs, in another order each epoch; yields the rank's part of every micro-batch."""

    def __init__(self, pairs, micro, rank, world, vocab=40, length=10):
        g = torch.Generator().manual_seed(31)
        taste = torch.randn(vocab, generator=g)
        a = torch.randint(0, vocab, (pairs, length), generator=g)
        b = torch.randint(0, vocab, (pairs, length), generator=g)
        swap = taste[a].sum(1) < taste[b].sum(1)
        self.chosen = torch.where(swap.unsqueeze(1), b, a)
        self.rejected = torch.where(swap.unsqueeze(1), a, b)
        self.micro, self.rank, self.world = micro, rank, world

    def __len__(self):
        return len(self.chosen) // self.micro

    def epoch(self, n):
        order = torch.randperm(len(self.chosen), generator=torch.Generator().manual_seed(900 + n))
        k = self.micro // self.world
        for i in range(len(self)):
            idx = order[i * self.micro:(i + 1) * self.micro][self.rank * k:(self.rank + 1) * k]
            yield i, self.chosen[idx], self.rejected[idx]

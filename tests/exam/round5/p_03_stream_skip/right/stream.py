"""Endless shuffled stream of global micro-batches; every epoch has its own permutation."""
import torch


class MicroStream:
    def __init__(self, n, micro, rank, world, seed):
        self.n, self.micro, self.rank, self.world, self.seed = n, micro, rank, world, seed
        self.per_epoch = n // micro
        self.cursor = 0          # micro-batches handed out so far

    def fast_forward(self, micro_batches):
        self.cursor = micro_batches

    def __iter__(self):
        return self

    def __next__(self):
        epoch, i = divmod(self.cursor, self.per_epoch)
        g = torch.Generator().manual_seed(self.seed + 7919 * epoch)
        perm = torch.randperm(self.n, generator=g)
        idx = perm[i * self.micro:(i + 1) * self.micro]
        self.cursor += 1
        share = self.micro // self.world
        return idx[self.rank * share:(self.rank + 1) * share]


def corpus(n=384, t=13, vocab=29, seed=3):
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(1, 6, (n, 1), generator=g)
    x = torch.randint(0, vocab, (n, 1), generator=g)
    cols = [x]
    for _ in range(t - 1):
        cols.append((cols[-1] * 2 + a) % vocab)
    return torch.cat(cols, 1)

"""A stream of tokens from a sparse Markov chain, read in windows."""

import torch


def token_stream(vocab, n, seed=17):
    g = torch.Generator().manual_seed(seed)
    succ = torch.stack([torch.randperm(vocab, generator=g)[:3] for _ in range(vocab)])
    choice = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), n, replacement=True, generator=g)
    out, t = torch.empty(n, dtype=torch.long), 0
    for i in range(n):
        t = int(succ[t, choice[i]])
        out[i] = t
    return out


class WindowLoader:
    """Global batch b of step s: the b windows whose starts are drawn from (seed, s); rank r takes its b / world."""

    def __init__(self, stream, block, batch, rank, world, seed=23):
        assert batch % world == 0
        self.stream, self.block, self.batch, self.seed = stream, block, batch, seed
        n = batch // world
        self.mine = slice(rank * n, (rank + 1) * n)

    def get(self, step):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.stream) - self.block - 1, (self.batch,), generator=g)[self.mine]
        rows = self.stream[starts[:, None] + torch.arange(self.block + 1)]
        return rows[:, :-1], rows[:, 1:]

"""A small corpus of documents from a random order-1 grammar, packed into rows of ctx + 1 tokens."""
import torch


def build_corpus(vocab, rows, ctx, seed=11):
    g = torch.Generator().manual_seed(seed)
    nxt = torch.stack([torch.randperm(vocab, generator=g)[:3] for _ in range(vocab)])
    out = torch.empty(rows, ctx + 1, dtype=torch.long)
    out[:, 0] = torch.randint(vocab, (rows,), generator=g)
    for t in range(ctx):
        pick = torch.randint(3, (rows,), generator=g)
        out[:, t + 1] = nxt[out[:, t], pick]
    return out


class EpochLoader:
    """Yields the rows of this rank, one micro-batch after the other; all ranks see the same number of them."""

    def __init__(self, rows, micro_batch, rank, world, seed=5):
        self.rows, self.micro, self.rank, self.world, self.seed = rows, micro_batch, rank, world, seed

    def __len__(self):
        return len(self.rows) // self.micro

    def epoch(self, n):
        g = torch.Generator().manual_seed(self.seed * 1000 + n)
        order = torch.randperm(len(self.rows), generator=g)
        share = self.micro // self.world
        for i in range(len(self)):
            lo = i * self.micro + self.rank * share
            yield self.rows[order[lo:lo + share]]


def groups(iterable, size):
    """Lists of `size` micro-batches; what is left at the end of the epoch makes a shorter list."""
    buf = []
    for item in iterable:
        buf.append(item)
        if len(buf) == size:
            yield buf
            buf = []
    if buf:
        yield buf

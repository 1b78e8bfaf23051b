import torch


class TokenStream:
    """An endless synthetic token stream cut into consecutive micro-batches; `pos` counts micro-batches given out."""

    def __init__(self, vocab, ctx, micro, rank, world, seed=77):
        self.vocab, self.ctx, self.micro = vocab, ctx, micro
        self.rank, self.world = rank, world
        self.seed = seed
        self.pos = 0

    def _document(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        key = torch.randint(1, 6, (1,), generator=g).item()
        x = torch.randint(0, self.vocab, (1,), generator=g).item()
        jumps = torch.rand(self.ctx + 1, generator=g)
        fresh = torch.randint(0, self.vocab, (self.ctx + 1,), generator=g)
        out = []
        for t in range(self.ctx + 1):
            x = fresh[t].item() if jumps[t] < 0.1 else (x + key) % self.vocab
            out.append(x)
        return torch.tensor(out)

    def next(self):
        first = self.pos * self.micro
        mine = range(first + self.rank, first + self.micro, self.world)
        rows = torch.stack([self._document(i) for i in mine])
        self.pos += 1
        return rows[:, :-1], rows[:, 1:]

    def skip(self, n):
        self.pos += n

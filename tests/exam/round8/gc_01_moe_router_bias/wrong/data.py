import torch


class MarkovText:
    """Sequences of a random Markov chain; the first half of every global batch comes from one 'domain', the second from another."""

    def __init__(self, vocab, ctx, global_batch, seed):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.ctx, self.global_batch, self.seed = vocab, ctx, global_batch, seed
        self.tables = [torch.softmax(4 * torch.randn(vocab, vocab, generator=g), -1) for _ in range(2)]

    def batch(self, step, rank, world):
        g = torch.Generator().manual_seed(self.seed + 7919 * (step + 1))
        half = self.global_batch // 2
        parts = []
        for d, table in enumerate(self.tables):
            lo = d * self.vocab // 2
            cur = torch.randint(lo, lo + self.vocab // 2, (half,), generator=g)
            seq = [cur]
            for _ in range(self.ctx):
                cur = torch.multinomial(table[cur], 1, generator=g)[:, 0]
                seq.append(cur)
            parts.append(torch.stack(seq, 1))
        ids = torch.cat(parts)
        n = self.global_batch // world
        ids = ids[rank * n:(rank + 1) * n]
        return ids[:, :-1], ids[:, 1:]

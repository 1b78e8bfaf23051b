import torch


def make_corpus(vocab, length, seed):
    """A noisy second-order chain: next = (a * cur + prev + c) mod vocab."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.rand(length, generator=g)
    rand = torch.randint(vocab, (length,), generator=g)
    out = [1, 2]
    for i in range(length):
        out.append(int(rand[i]) if noise[i] < 0.1 else (3 * out[-1] + out[-2] % 4 + 5) % vocab)
    return torch.tensor(out)


class WindowSampler:
    """Draws the same global batch on every rank and hands out this rank's rows."""

    def __init__(self, corpus, ctx, global_batch, rank, world, seed):
        assert global_batch % world == 0
        self.corpus, self.ctx, self.global_batch = corpus, ctx, global_batch
        self.rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
        self.gen = torch.Generator().manual_seed(seed)

    def next(self):
        start = torch.randint(len(self.corpus) - self.ctx - 1, (self.global_batch,), generator=self.gen)[self.rows]
        window = torch.stack([self.corpus[s : s + self.ctx + 1] for s in start.tolist()])
        return window[:, :-1], window[:, 1:]

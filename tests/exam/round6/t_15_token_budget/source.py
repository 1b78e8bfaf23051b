import torch


class Ragged:
    """Sequences of very different length, in micro-batches padded to the longest one."""

    def __init__(self, vocab=32, micro=8, seed=2):
        self.vocab, self.micro, self.seed = vocab, micro, seed
        self.cursor = 0

    def next(self):
        g = torch.Generator().manual_seed(self.seed + 97 * self.cursor)
        self.cursor += 1
        length = torch.randint(4, 25, (self.micro,), generator=g)
        step = torch.randint(1, 4, (self.micro, 1), generator=g)
        start = torch.randint(0, self.vocab, (self.micro, 1), generator=g)
        t = torch.arange(26)
        ids = (start + step * t + t // 4) % self.vocab
        target = ids[:, 1:].masked_fill(t[None, 1:] > length[:, None], -100)
        return ids[:, :-1], target

import torch

VOCAB = 16


class Chains:
    """Sequences of a fixed random Markov chain."""

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.p = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=g), 1)

    def batch(self, step, rows, length=12):
        g = torch.Generator().manual_seed(31 * step + 17)
        x = [torch.randint(0, VOCAB, (rows,), generator=g)]
        for _ in range(length):
            x.append(torch.multinomial(self.p[x[-1]], 1, generator=g).squeeze(1))
        return torch.stack(x, 1)

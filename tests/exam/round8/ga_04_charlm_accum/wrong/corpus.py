import torch


class Corpus:
    """Text from a random order-1 Markov chain, cut into windows; one pass over the windows is an epoch."""

    def __init__(self, windows=80, length=24, vocab=28):
        g = torch.Generator().manual_seed(13)
        table = torch.softmax(2.5 * torch.randn(vocab, vocab, generator=g), -1)
        seq = torch.zeros(windows, length + 1, dtype=torch.long)
        seq[:, 0] = torch.randint(vocab, (windows,), generator=g)
        for t in range(length):
            seq[:, t + 1] = torch.multinomial(table[seq[:, t]], 1, generator=g)[:, 0]
        self.seq = seq

    def epoch(self, epoch, micro, rank, world):
        order = torch.randperm(len(self.seq), generator=torch.Generator().manual_seed(500 + epoch))
        for idx in order.split(micro):
            part = self.seq[idx.chunk(world)[rank]]
            yield part[:, :-1], part[:, 1:]

    def micro_batches(self, micro):
        return len(self.seq) // micro

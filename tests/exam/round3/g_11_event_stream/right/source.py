import torch

VOCAB, LENGTH = 32, 16


class Source:
    """`plan(step)` gives the micro-batches of this rank with the factor of their summed loss"""

    def __init__(self, rank, world, rows=16, micro=2):
        self.rank, self.world, self.rows, self.micro = rank, world, rows, micro

    def plan(self, step):
        g = torch.Generator().manual_seed(step)
        start = torch.randint(0, VOCAB, (self.rows, 1), generator=g)
        rows = (start + torch.arange(LENGTH + 1) ** 2) % VOCAB
        rows = torch.where(
            torch.rand(rows.shape, generator=g) < 0.05, torch.randint(0, VOCAB, rows.shape, generator=g), rows
        )
        mine = rows[self.rank :: self.world]
        # FSDP averages over the ranks: sum over all tokens = world * average of the sums
        weight = self.world / (self.rows * LENGTH)
        return [(part[:, :-1], part[:, 1:], weight) for part in mine.split(self.micro)]

import torch


class Histories:
    """Walks over a hidden sparse graph of items; a batch depends on the step alone."""

    def __init__(self, items, length, n=512, seed=17):
        g = torch.Generator().manual_seed(seed)
        follow = torch.stack([torch.randperm(items, generator=g) for _ in range(2)], dim=1)
        seq = [torch.randint(0, items, (n,), generator=g)]
        for _ in range(length):
            which = (torch.rand(n, generator=g) < 0.25).long()
            seq.append(follow[seq[-1], which])
        self.rows = torch.stack(seq, dim=1)

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(10_000 + step)
        pick = torch.randperm(len(self.rows), generator=g)[:size][rank::world]
        rows = self.rows[pick]
        return rows[:, :-1], rows[:, 1:]

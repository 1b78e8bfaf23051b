import torch


class GrowingBatches:
    """The global batch doubles at given steps. A batch is cut into micro-batches of at most `cap` samples per rank.
    Micro-batches of the tail may be smaller."""

    def __init__(self, n, base, doubles, cap, rank, world, seed=0):
        self.n, self.base, self.doubles, self.cap, self.rank, self.world, self.seed = n, base, doubles, cap, rank, world, seed

    def size(self, step):
        return self.base * 2 ** sum(step >= d for d in self.doubles)

    def offset(self, step):
        return sum(self.size(s) for s in range(step))

    def at(self, step):
        size, lo = self.size(step), self.offset(step)
        ids = []
        for k in range(lo, lo + size):
            epoch, i = divmod(k, self.n)
            ids.append((epoch, i))
        perms = {e: torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + e)) for e in {e for e, _ in ids}}
        ids = torch.stack([perms[e][i] for e, i in ids])
        return ids[self.rank :: self.world].split(self.cap), size

import torch

from columns import CATEGORICAL, NUMERIC


class Encoder:
    """Maps each string to an integer in order of first appearance; 0 is kept for unseen values."""

    def __init__(self, rows):
        self.vocab = {c: {} for c in CATEGORICAL}
        for row in rows:
            for c in CATEGORICAL:
                self.vocab[c].setdefault(row[c], len(self.vocab[c]) + 1)

    def __call__(self, rows):
        cats = torch.tensor([[self.vocab[c].get(r[c], 0) for c in CATEGORICAL] for r in rows])
        nums = torch.tensor([[r[c] for c in NUMERIC] for r in rows])
        return cats, nums, torch.tensor([r["cost"] for r in rows])


class Shard:
    """Every world-th row belongs to this rank; batches are cut so that the global batch is rows [i*B, (i+1)*B)."""

    def __init__(self, rows, rank, world, batch):
        self.local = rows[rank::world]
        self.batch = batch // world

    def fit(self, encoder):
        self.cats, self.nums, self.y = encoder(self.local)
        return self

    def at(self, step):
        n = len(self.local) // self.batch
        i = (step % n) * self.batch
        s = slice(i, i + self.batch)
        return self.cats[s], self.nums[s], self.y[s]

"""Easy-to-hard curriculum: the pool grows along the samples sorted by difficulty."""
import torch


class Curriculum:
    def __init__(self, difficulty, epochs, start=0.4, seed=0):
        self.order = torch.argsort(difficulty, stable=True)
        self.epochs = epochs
        self.start = start
        self.seed = seed

    def pool_size(self, epoch):
        share = min(1.0, self.start + (1 - self.start) * epoch / max(1, self.epochs - 2))
        return int(share * len(self.order))

    def batches(self, epoch, batch, rank, world):
        """Each rank's part of the epoch's global batches."""
        g = torch.Generator().manual_seed(self.seed + 31 * epoch)
        pool = self.order[: self.pool_size(epoch)]
        shuffled = pool[torch.randperm(len(pool), generator=g)]
        for i in range(0, len(shuffled) - batch + 1, batch):
            yield shuffled[i : i + batch][rank::world]

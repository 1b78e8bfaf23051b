import torch


class MicroBatches:
    """Micro-batches of one epoch for this rank, shuffled by the epoch's number."""

    def __init__(self, data, per_micro, rank, world):
        self.data, self.per_micro, self.rank, self.world = data, per_micro, rank, world
        self.epoch = 0

    def __len__(self):
        return len(self.data) // self.per_micro

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        for i in range(len(self)):
            chunk = order[i * self.per_micro : (i + 1) * self.per_micro]
            yield self.data[chunk.chunk(self.world)[self.rank]]

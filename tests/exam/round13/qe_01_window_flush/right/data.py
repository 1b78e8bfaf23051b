import torch


class SensorSet:
    def __init__(self, size=160, sensors=8, channels=4, seed=11):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, sensors, channels, generator=g)
        w = torch.randn(sensors, channels, generator=g)
        self.y = torch.tanh((self.x * w).sum((1, 2)) / 3) + 0.5 * self.x[:, 0, 0]

    def __len__(self):
        return len(self.x)


class ShardedLoader:
    """Shuffled batches, reshuffled per epoch; every rank reads its slice of each batch."""

    def __init__(self, data, batch_size, rank, world, seed=0):
        if batch_size % world:
            raise ValueError("batch size must be a multiple of the number of ranks")
        self.data, self.batch_size, self.rank, self.world, self.seed = data, batch_size, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data) // self.batch_size

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1009 + self.epoch)
        order = torch.randperm(len(self.data), generator=g)
        share = self.batch_size // self.world
        for i in range(len(self)):
            start = i * self.batch_size + self.rank * share
            pick = order[start : start + share]
            yield self.data.x[pick], self.data.y[pick]

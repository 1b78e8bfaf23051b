import torch


def assign(lengths, world):
    """Longest first to the least loaded rank: ranks get different numbers of utterances but similar work."""
    load, parts = [0] * world, [[] for _ in range(world)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        r = load.index(min(load))
        parts[r].append(i)
        load[r] += lengths[i]
    return parts


class BalancedBatches:
    def __init__(self, data, batch, rank, world, steps, seed=0):
        self.data, self.batch, self.rank, self.world, self.steps, self.seed = data, batch, rank, world, steps, seed

    def __iter__(self):
        for step in range(self.steps):
            g = torch.Generator().manual_seed(self.seed + step)
            ids = torch.randperm(len(self.data), generator=g)[: self.batch].tolist()
            lengths = [len(self.data[i][1]) for i in ids]
            yield [self.data[ids[k]] for k in assign(lengths, self.world)[self.rank]], sum(lengths)

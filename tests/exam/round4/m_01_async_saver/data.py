import torch


class Batches:
    """Step-indexed batches: batch number k is the same whatever the number of ranks."""

    def __init__(self, global_batch, rank, world, n=768, seed=1234):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 12, generator=g)
        w = torch.randn(12, 4, generator=g) / 3
        self.y = torch.sin(self.x @ w) + 0.02 * torch.randn(n, 4, generator=g)
        self.global_batch, self.rank, self.world = global_batch, rank, world
        assert global_batch % world == 0

    def __call__(self, step):
        per_epoch = len(self.x) // self.global_batch
        epoch, k = divmod(step, per_epoch)
        perm = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        idx = perm[k * self.global_batch:(k + 1) * self.global_batch]
        idx = idx.chunk(self.world)[self.rank]
        return self.x[idx], self.y[idx]

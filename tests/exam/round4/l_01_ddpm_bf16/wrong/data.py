import torch


def make_images(n, size=8, seed=0):
    """Soft blobs on a dark ground: a toy image set with two degrees of freedom."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.rand(n, 2, generator=g) * (size - 3) + 1
    width = 1.0 + torch.rand(n, 1, 1, generator=g)
    d2 = (yy - centre[:, 0, None, None]) ** 2 + (xx - centre[:, 1, None, None]) ** 2
    img = torch.exp(-d2 / (2 * width ** 2))
    return (img * 2 - 1).unsqueeze(1)


class GlobalBatches:
    """Epoch permutation shared by all ranks; every rank takes its part of each global batch."""

    def __init__(self, data, batch, rank, world, seed=11):
        self.data, self.batch, self.rank, self.world, self.seed = data, batch, rank, world, seed
        self.per_epoch = len(data) // batch

    def at(self, step):
        epoch, i = divmod(step, self.per_epoch)
        g = torch.Generator().manual_seed(self.seed + epoch)
        perm = torch.randperm(len(self.data), generator=g)
        ids = perm[i * self.batch:(i + 1) * self.batch]
        return self.data[ids[self.rank::self.world]]

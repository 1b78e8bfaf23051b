import torch


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(77))
    y = torch.randint(0, 8, (n,), generator=g)
    x = proto[y] * (0.5 + torch.rand(n, 1, 1, 1, generator=g)) + 0.8 * torch.randn(n, 1, 8, 8, generator=g)
    return x, y


def batches(n, size, epoch, rank, world):
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(300 + epoch))
    for b in range(n // size):
        yield perm[b * size : (b + 1) * size][rank::world]

import torch


def make_split(n, seed, dim=10, classes=5, sort=False):
    """Clusters of growing width: the later classes are harder."""
    centers = 1.5 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(40))
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = centers[y] + (0.4 + 0.6 * y[:, None]) * torch.randn(n, dim, generator=g)
    order = y.argsort(stable=True) if sort else torch.randperm(n, generator=g)
    return x[order], y[order]


def chunks(split, size, rank, world):
    x, y = split
    for i in range(0, len(x) - size + 1, size):
        yield x[i : i + size][rank::world], y[i : i + size][rank::world]

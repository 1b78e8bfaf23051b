import torch


def pictures(n=256, side=6, seed=5):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(8, side * side, generator=g)
    y = torch.randint(0, 8, (n,), generator=g)
    return proto[y] + 0.3 * torch.randn(n, side * side, generator=g)


def two_views(x, step, seed):
    """Random brightness, noise and erasing; x is the global batch."""
    g = torch.Generator().manual_seed(seed * 7919 + step)
    out = []
    for _ in range(2):
        v = x * (0.8 + 0.4 * torch.rand(len(x), 1, generator=g))
        v = v + 0.2 * torch.randn(x.shape, generator=g)
        out.append(v * (torch.rand(x.shape, generator=g) > 0.2))
    return out

import torch


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(n, generator=g) * 3.1416
    up = torch.rand(n, generator=g) < 0.5
    x = torch.stack([torch.where(up, a.cos(), 1 - a.cos()), torch.where(up, a.sin(), 0.5 - a.sin())], 1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


def noised(x0, step, seed):
    g = torch.Generator().manual_seed(seed * 65537 + step)
    pick = torch.randint(0, len(x0), (64,), generator=g)
    t = torch.rand(64, generator=g)
    eps = torch.randn(64, 2, generator=g)
    s = t[:, None]
    return (1 - s).sqrt() * x0[pick] + s.sqrt() * eps, t, eps

"""Noise as a pure function of (step, purpose): nothing to save, nothing that depends on the number of ranks."""
import torch


def rng(step, purpose):
    return torch.Generator().manual_seed((step << 8) ^ {"data": 1, "time": 2, "eps": 3}[purpose])


def rows(step, n, rank, world, dim=2):
    mine = slice(rank, None, world)
    g = rng(step, "data")
    u = 3.1416 * torch.rand(n, generator=g)
    side = torch.randint(0, 2, (n,), generator=g).float()
    moon = torch.stack([u.cos() + side - 0.5, (1 - 2 * side) * u.sin() + side * 0.5 - 0.25], 1)
    eps = torch.randn(n, dim, generator=rng(step, "eps"))
    t = torch.rand(n, 1, generator=rng(step, "time"))
    return moon[mine], eps[mine], t[mine]

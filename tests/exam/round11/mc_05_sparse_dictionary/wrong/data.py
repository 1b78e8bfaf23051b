import torch


def make_telemetry(n=960, dim=24, factors=12, seed=9):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(factors, dim, generator=g)
    load = torch.rand(n, factors, generator=g) * (torch.rand(n, factors, generator=g) < 0.2)
    x = load @ basis + 0.03 * torch.randn(n, dim, generator=g) + 0.2
    broken = torch.randn(96, dim, generator=g) * x.std() + 0.2
    return x, broken

import torch


def claims(n=384, columns=10):
    """insurance-like table: numeric columns, two step effects and an interaction"""
    g = torch.Generator().manual_seed(55)
    x = torch.randn(n, columns, generator=g)
    y = (x[:, 0] > 0.3).float() + 0.8 * x[:, 1] * x[:, 2].sigmoid() - (x[:, 3] < -0.5).float() + 0.3 * x[:, 4]
    return x, (y + 0.1 * torch.randn(n, generator=g) - y.mean())[:, None]


def rows(step, batch, n, rank, world):
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(step))[:batch]
    return ids.chunk(world)[rank]

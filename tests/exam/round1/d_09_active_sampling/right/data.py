import torch


def make(n=400, seed=31):
    """Two moons-like regression: a few rows lie in a hard region that uniform sampling rarely meets."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    hard = x[:, 0] > 1.0
    y = x[:, 1] - 0.5 * x[:, 2] + torch.where(hard, 3 * torch.sin(2 * x[:, 3]), torch.zeros(n))
    return x, y

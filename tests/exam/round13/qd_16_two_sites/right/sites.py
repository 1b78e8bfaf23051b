import torch

SITES = 2


def site_batch(site, round_, step, n, dim=10):
    """Every site has its own inputs and its own bias in the labels."""
    g = torch.Generator().manual_seed(100_000 * (site + 1) + 100 * round_ + step)
    w = torch.randn(dim, generator=torch.Generator().manual_seed(2))
    x = torch.randn(n, dim, generator=g) + (0.7 if site else -0.7)
    y = torch.sin(x @ w / 2) + (0.3 if site else 0.0)
    return x, y[:, None]

import torch


def bearings(n, seed):
    """Life of bearings from load, speed and lubrication; censored at the end of the study."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    hazard = torch.exp(0.9 * x[:, 0] - 0.6 * x[:, 1] + 0.5 * x[:, 2] * x[:, 3])
    life = -torch.log(torch.rand(n, generator=g)) / hazard
    end = 0.2 + 3 * torch.rand(n, generator=g)
    return x, torch.minimum(life, end), (life <= end).float()

import torch


def make(n=384, seed=51):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    x = x[(x[:, 0] < 0.3) | (x[:, 0] > 1.0)]  # a gap, where the members should disagree
    x = x[:256]
    return x, torch.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(len(x), generator=g)


def poisson_weights(n, members, seed=52):
    """weights[i, j]: how often row j occurs in the bootstrap sample of member i."""
    g = torch.Generator().manual_seed(seed)
    return torch.poisson(torch.ones(members, n), generator=g)

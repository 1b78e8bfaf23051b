import torch


def make(n=512, seed=41):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    y = torch.where(x[:, 0] > 0.2, 1.0, -1.0) + 2 * x[:, 1] * x[:, 2] + torch.sin(3 * x[:, 3]) + 0.05 * torch.randn(n, generator=g)
    return x, y - y.mean()

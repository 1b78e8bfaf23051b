import torch


def ring(counter, n):
    g = torch.Generator().manual_seed(11 + counter)
    a = torch.rand(n, generator=g) * 6.2832
    return torch.stack([2 + a.cos(), a.sin() - 1], 1) + 0.05 * torch.randn(n, 2, generator=g)


def latent(counter, n):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(900_001 + counter))

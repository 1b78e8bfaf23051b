import torch


def spectra(n, seed, bands=20, classes=5):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    f = torch.arange(bands).float()
    pitch = 2.0 + y + 0.25 * torch.randn(n, generator=g)
    x = torch.cos(6.28 * f[None] / pitch[:, None]) * torch.exp(-f / 12) + 0.3 * torch.randn(n, bands, generator=g)
    return x, y

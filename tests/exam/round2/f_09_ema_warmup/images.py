import torch


def stripes(n=192, seed=31):
    """Class = orientation of a noisy stripe pattern."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    r = torch.arange(12.0)
    yy, xx = torch.meshgrid(r, r, indexing="ij")
    ang = y * torch.pi / 4
    phase = torch.rand(n, generator=g) * 6.28
    wave = torch.sin(1.3 * (ang.cos()[:, None, None] * xx + ang.sin()[:, None, None] * yy) + phase[:, None, None])
    return (wave + 0.5 * torch.randn(n, 12, 12, generator=g)).unsqueeze(1), y

"""Travel-time tomography: straight rays through a smooth 2-D slowness field, given by a network."""
import torch
import torch.nn as nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return x + 0.5 * torch.sin(self.lin(x))


class Slowness(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.blocks = nn.ModuleList([Residual(width), Residual(width)])
        self.out = nn.Linear(width, 1)

    def forward(self, xy):
        h = torch.sin(3 * self.inp(xy))
        for b in self.blocks:
            h = b(h)
        return 1.0 + self.out(h)


def true_slowness(xy):
    blob = torch.exp(-((xy - torch.tensor([0.6, 0.4])).square().sum(-1)) / 0.03)
    return 1.0 + 0.4 * xy[..., 1] + 0.5 * blob


def survey(n_rays=64, n_points=24, seed=71):
    g = torch.Generator().manual_seed(seed)
    a = torch.stack([torch.zeros(n_rays), torch.rand(n_rays, generator=g)], -1)
    b = torch.stack([torch.ones(n_rays), torch.rand(n_rays, generator=g)], -1)
    s = (torch.arange(n_points) + 0.5) / n_points
    points = a[:, None] + s[:, None] * (b - a)[:, None]
    length = (b - a).norm(dim=-1)
    times = true_slowness(points).mean(1) * length
    times = times + 0.002 * torch.randn(n_rays, generator=g)
    return points, length, times

import torch
from torch import nn


class VNet(nn.Module):
    """Predicts the velocity of a straight path; told the time and the size of the step."""

    def __init__(self, pixels=25, width=32):
        super().__init__()
        self.first = nn.Linear(pixels + 2, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, pixels)

    def forward(self, x, t, h):
        return self.last(self.mid(self.first(torch.cat([x, t, h], 1))))


def walk(net, x, t, h, substeps):
    """Follow the net from t to t + h in equal parts; returns the mean velocity."""
    y = x
    for _ in range(substeps):
        y = y + net(y, t, h / substeps) * h / substeps
        t = t + h / substeps
    return (y - x) / h


def sprites(seed, n):
    g = torch.Generator().manual_seed(seed)
    cut = torch.randint(1, 5, (n, 1, 1), generator=g)
    img = (torch.arange(5)[None, None, :] < cut).float().expand(n, 5, 5).reshape(n, 25) * 2 - 1
    return img, torch.randn(n, 25, generator=g), torch.rand(n, 1, generator=g)

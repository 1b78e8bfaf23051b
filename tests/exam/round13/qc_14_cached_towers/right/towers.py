import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, fields, width=24, out=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(fields, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def visits(n, seed):
    """Features of a user and of the item which he chose; both see a common taste."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.Generator().manual_seed(7)
    taste = torch.randn(n, 5, generator=g)
    user = taste @ torch.randn(5, 10, generator=mix) + 0.3 * torch.randn(n, 10, generator=g)
    item = taste @ torch.randn(5, 8, generator=mix) + 0.3 * torch.randn(n, 8, generator=g)
    return user, item

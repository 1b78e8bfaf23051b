import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, d_in, width=48, d_out=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.out = nn.Linear(width, d_out)

    def forward(self, x):
        return F.normalize(self.out(self.net(x)), dim=-1)


def pairs(step, n):
    g = torch.Generator().manual_seed(500 + step)
    wq, wd = (torch.randn(8, d, generator=torch.Generator().manual_seed(d)) for d in (20, 28))
    z = torch.randn(n, 8, generator=g)
    return z @ wq + 0.5 * torch.randn(n, 20, generator=g), z @ wd + 0.5 * torch.randn(n, 28, generator=g)

import math

import torch
import torch.nn.functional as F
from torch import nn


def time_features(t, dim):
    freq = torch.exp(-math.log(1000.0) * torch.arange(dim // 2) / (dim // 2))
    arg = t.float()[:, None] * freq
    return torch.cat([arg.sin(), arg.cos()], 1)


class Block(nn.Module):
    def __init__(self, width, tdim):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(tdim, width)

    def forward(self, x, temb):
        return x + self.conv(F.silu(self.norm(x) + self.time(temb)[:, :, None, None]))


class EpsNet(nn.Module):
    def __init__(self, width=16, tdim=16, depth=1):
        super().__init__()
        self.tdim = tdim
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, tdim) for _ in range(depth))
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        temb = time_features(t, self.tdim)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, temb)
        return self.out(F.silu(h))

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class GaussianFourierProjection(nn.Module):
    """Random features of the noise level; fixed, not trained."""

    def __init__(self, dim, scale=4.0):
        super().__init__()
        self.register_buffer("freqs", torch.randn(dim // 2) * scale)

    def forward(self, t):
        angle = t[:, None] * self.freqs[None] * 2 * math.pi
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, ch), nn.GroupNorm(4, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.emb = nn.Linear(emb, ch)

    def forward(self, x, e):
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(e)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class ScoreNet(nn.Module):
    def __init__(self, ch=24, emb=32, depth=3):
        super().__init__()
        self.embed = nn.Sequential(GaussianFourierProjection(emb), nn.Linear(emb, emb), nn.SiLU())
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(ch, emb) for _ in range(depth)])
        self.head = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, sigma):
        e = self.embed(torch.log(sigma))
        h = self.stem(x / (1 + sigma[:, None, None, None] ** 2).sqrt())
        for block in self.blocks:
            h = block(h, e)
        return self.head(h) / sigma[:, None, None, None]

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    arg = t[:, None].float() * freqs[None]
    return torch.cat([arg.cos(), arg.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, ch), nn.GroupNorm(4, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.emb = nn.Linear(emb, ch)

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class TinyUNet(nn.Module):
    def __init__(self, ch=12, emb=32):
        super().__init__()
        self.emb_dim = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.down = ResBlock(ch, emb)
        self.mid = ResBlock(ch, emb)
        self.up = ResBlock(ch, emb)
        self.head = nn.Conv2d(ch, 1, 3, padding=1)

    def blocks(self):
        return [self.down, self.mid, self.up]

    def forward(self, x, t):
        emb = timestep_embedding(t, self.emb_dim)
        emb = self.time(emb.to(self.time[0].weight.dtype))
        h0 = self.down(self.stem(x), emb)
        h = self.mid(F.avg_pool2d(h0, 2), emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.head(self.up(h + h0, emb))

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v))
        return x + self.ff(self.n2(x))


class FlexViT(nn.Module):
    """Position table of 4x4, interpolated to the grid at hand."""

    def __init__(self, d=16, depth=2, classes=4, patch=3):
        super().__init__()
        self.embed = nn.Conv2d(1, d, patch, patch)
        self.pos = nn.Parameter(0.5 * torch.randn(1, d, 4, 4))
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        h = self.embed(x)
        h = h + F.interpolate(self.pos, size=h.shape[-2:], mode="bilinear", align_corners=False)
        h = h.flatten(2).transpose(1, 2)
        for b in self.blocks:
            h = b(h)
        return self.head(h.mean(1))

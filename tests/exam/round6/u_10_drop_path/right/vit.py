import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class PathDropper:
    """Stochastic depth. The choice is drawn for the global batch, so that it does not depend on the number of ranks."""

    def __init__(self, rate, seed, rank, world):
        self.rate, self.rank, self.world = rate, rank, world
        self.gen = torch.Generator().manual_seed(seed)

    def keep(self, n):
        draw = torch.rand(n * self.world, generator=self.gen)
        mask = (draw >= self.rate).float() / (1 - self.rate)
        return mask[self.rank * n:(self.rank + 1) * n, None, None]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def attend(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, keep=None):
        if keep is None:
            keep = lambda n: 1.0
        x = x + keep(x.shape[0]) * self.attend(self.norm1(x))
        return x + keep(x.shape[0]) * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Replay:
    """Hands out choices that were drawn before."""

    def __init__(self, masks):
        self.masks, self.i = masks, -1

    def __call__(self, n):
        self.i = (self.i + 1) % len(self.masks)
        return self.masks[self.i]


class ViT(nn.Module):
    def __init__(self, dropper, dim=32, depth=4, heads=4, classes=8):
        super().__init__()
        self.dropper = dropper
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.pos = nn.Parameter(0.02 * torch.randn(9, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            if self.training:
                n = x.shape[0]
                keep = Replay([self.dropper.keep(n) for _ in range(2)])
                x = checkpoint(block, x, keep, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x).mean(1))

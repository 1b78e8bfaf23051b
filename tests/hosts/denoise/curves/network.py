"""A transformer over the points of a curve, given the noise level through scales and shifts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .presets import Shape


class Attention(nn.Module):
    """Between all points. The number of heads is read from the projections, so a rank may hold only some of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count, points, _ = x.shape
        q, k, v = (part(x).view(count, points, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(count, points, -1))


class FeedForward(nn.Module):
    """Two layers with a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward under a norm whose scale and shift come from the noise level."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.modulation = nn.Linear(width, 2 * width)
        self.attention = Attention(width, heads)
        self.feed = FeedForward(width)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        scale, shift = self.modulation(level)[:, None].chunk(2, dim=-1)
        x = x + self.attention(self.norm1(x) * (1 + scale) + shift)
        return x + self.feed(self.norm2(x))


class Denoiser(nn.Module):
    """Noised points and their level to the noise."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.into = nn.Linear(2, shape.width)
        self.place = nn.Embedding(shape.points, shape.width)
        self.level = nn.Linear(shape.width, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.back = nn.Linear(shape.width, 2)

    def waves(self, level: Tensor) -> Tensor:
        """Sines and cosines of a level, [curves, width]."""
        half = self.shape.width // 2
        speed = torch.exp(-math.log(1000.0) * torch.arange(half, device=level.device) / half)
        angle = level[:, None] * speed
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def forward(self, points: Tensor, level: Tensor) -> Tensor:
        order = torch.arange(points.shape[1], device=points.device)
        x = self.into(points) + self.place(order)
        embedded = F.silu(self.level(self.waves(level)))
        for block in self.blocks:
            x = block(x, embedded)
        return self.back(self.norm(x))

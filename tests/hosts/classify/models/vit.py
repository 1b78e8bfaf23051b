"""A vision transformer with a class token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from core.registry import MODELS
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward, both on normed input, both scaled by a learned vector."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.full((2, width), 0.5))

    def attend(self, x: Tensor) -> Tensor:
        """Attention between all patches."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain[0] * self.attend(self.norm1(x))
        return x + self.gain[1] * self.down(F.gelu(self.up(self.norm2(x))))


@MODELS.register("vit")
class VisionTransformer(nn.Module):
    """Images [batch, 3, size, size] to logits."""

    def __init__(self, image_size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        patches = (image_size // patch) ** 2
        self.stem = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

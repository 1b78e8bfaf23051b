"""A vision transformer: patches of an image as tokens, a class token that reads them, a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(
            batch, tokens, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head size)
        attended = (
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        )
        x = x + self.projection(attended)
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    def __init__(
        self, image_size: int, patch: int, width: int, depth: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (image_size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) to the logits (batch, classes)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        x = (
            torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1)
            + self.positions
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(
    image_size: int = 32,
    patch: int = 8,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    classes: int = 3,
) -> VisionTransformer:
    """The factory that spec.yaml names; its random numbers follow from the seed of the spec."""
    return VisionTransformer(image_size, patch, width, depth, heads, classes)

"""A convolutional mixer. Its norms look at one sample only, so its losses do not depend on how a batch is cut."""

from __future__ import annotations

import torch.nn.functional as F
from core.registry import MODELS
from torch import Tensor, nn


class Mix(nn.Module):
    """A depthwise convolution around which the input goes, then a pointwise one."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.space = nn.Conv2d(width, width, kernel, groups=width, padding=kernel // 2)
        self.channels = nn.Conv2d(width, width, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(F.gelu(self.space(x)))
        return self.norm2(F.gelu(self.channels(x)))


@MODELS.register("mixer")
class ConvMixer(nn.Module):
    """Images [batch, 3, size, size] to logits."""

    def __init__(self, image_size: int, patch: int, width: int, depth: int, classes: int, kernel: int = 3) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError("the image does not divide into patches")
        self.stem = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Mix(width, kernel) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))

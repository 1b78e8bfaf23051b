"""The model and the data of trainer.py: an MLP classifier of random points."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

FEATURES, WIDTH, CLASSES = 32, 96, 10
Batch = tuple[Tensor, Tensor]


class Points(Dataset[Batch]):
    """Random points; the label is the class that a fixed random matrix scores highest."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, FEATURES, generator=generator) + 0.5
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index], self.y[index]


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that begins behind the first `start` samples of this rank."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.drop(self.down(F.gelu(self.up(self.norm(x))))))


class Classifier(nn.Module):
    """Inputs are centred by their running mean, which is a buffer."""

    input_mean: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.register_buffer("input_mean", torch.zeros(FEATURES))
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x - self.input_mean)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))

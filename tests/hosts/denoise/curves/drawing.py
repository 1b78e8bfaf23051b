"""Curves, and noise on them. All of a sample comes from its number."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Noised(NamedTuple):
    """Points [curves, points, 2] with noise, how much of it [curves], and the noise itself."""

    points: Tensor
    level: Tensor
    noise: Tensor

    def to(self, device: torch.device) -> Noised:
        """The same on a device."""
        return Noised(*(part.to(device) for part in self))


def curve(stream: torch.Generator, points: int) -> Tensor:
    """A rosette, a spiral or a wave, turned and scaled."""
    kind = int(torch.randint(3, (), generator=stream))
    size, turn, beat = torch.rand(3, generator=stream).tolist()
    along = torch.linspace(0, 1, points)
    angle = 2 * math.pi * (along + turn)
    if kind == 0:
        radius = 0.6 + 0.4 * torch.cos(2 * math.pi * along * (2 + round(3 * beat)))
    elif kind == 1:
        radius = 0.2 + along
        angle = angle * (1 + beat)
    else:
        flat = torch.stack([2 * along - 1, 0.5 * torch.sin(2 * math.pi * along * (1 + 2 * beat))], dim=-1)
        turned = torch.tensor([[math.cos(6 * turn), -math.sin(6 * turn)], [math.sin(6 * turn), math.cos(6 * turn)]])
        return (0.7 + 0.6 * size) * flat @ turned.t()
    return (0.7 + 0.6 * size) * torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def signal(level: Tensor, levels: int) -> Tensor:
    """The share of the variance that is left of the curve at a noise level: a cosine from one to nearly none."""
    return torch.cos((level + 0.5) / levels * math.pi / 2).square().clamp_min(1e-3)


def sample(number: int, seed: int, points: int, levels: int) -> Noised:
    """One noised curve."""
    stream = torch.Generator().manual_seed(seed * 1_000_000_007 + number)
    clean = curve(stream, points)
    level = torch.randint(levels, (), generator=stream)
    noise = torch.randn(points, 2, generator=stream)
    share = signal(level, levels)
    return Noised(share.sqrt() * clean + (1 - share).sqrt() * noise, level, noise)


def batch(numbers: range, seed: int, points: int, levels: int) -> Noised:
    """Several, side by side."""
    return Noised(
        *(torch.stack(part) for part in zip(*(sample(n, seed, points, levels) for n in numbers), strict=True))
    )


class Numbers:
    """Which curves this part of the world draws next. `drawn` counts those of the whole world."""

    def __init__(self, size: int, part: int, parts: int) -> None:
        if size % parts:
            raise SystemExit(f"{size} curves do not divide among {parts} parts of the world")
        self.size, self.part, self.each = size, part, size // parts
        self.drawn = 0

    def next(self, pieces: int) -> list[range]:
        """The next step's curves of this part, in pieces."""
        first = self.drawn + self.part * self.each
        self.drawn += self.size
        pieces = min(pieces, self.each)
        length = self.each // pieces
        return [range(first + k * length, first + (k + 1) * length) for k in range(pieces)]

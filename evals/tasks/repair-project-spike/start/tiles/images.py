"""Synthetic images: a few soft blobs on a slope, and in some of the training images the sensor's error."""

from __future__ import annotations

import torch

from .settings import ImageSettings


def blobs(count: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """[count, side, side], about zero in the mean."""
    axis = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    image = torch.rand(count, 2, 1, 1, generator=generator) - 0.5
    image = image[:, 0] * rows + image[:, 1] * columns
    for _ in range(3):
        middle = 1.6 * torch.rand(count, 2, 1, 1, generator=generator) - 0.8
        width = 0.15 + 0.25 * torch.rand(count, 1, 1, generator=generator)
        height = 2 * torch.rand(count, 1, 1, generator=generator) - 1
        square = (rows - middle[:, 0]).square() + (columns - middle[:, 1]).square()
        image = image + height * torch.exp(-square / (2 * width.square()))
    return image + 0.02 * torch.randn(count, side, side, generator=generator)


def overexpose(images: torch.Tensor, which: torch.Tensor, gains: torch.Tensor) -> None:
    """In place: too much light, and the more of it the later the sensor was read."""
    side = images.shape[-1]
    slope = torch.linspace(0.5, 1.5, side)
    images[which] = images[which] + gains[:, None, None] * slope


def tiles_of(images: torch.Tensor, tile: int) -> torch.Tensor:
    """[n, side, side] -> [n, tiles, pixels of a tile]."""
    n, side, _ = images.shape
    across = side // tile
    pieces = images.view(n, across, tile, across, tile).transpose(2, 3)
    return pieces.reshape(n, across * across, tile * tile)


def datasets(settings: ImageSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of the training images, some of them bad, and of the held-out ones, all good."""
    if settings.side % settings.tile:
        raise ValueError(f"images of {settings.side} pixels are not made of tiles of {settings.tile}")
    generator = torch.Generator().manual_seed(settings.seed)
    training = blobs(settings.training, settings.side, generator)
    held_out = blobs(settings.held_out, settings.side, generator)
    which = torch.randperm(settings.training, generator=generator)[: settings.bad]
    gains = torch.linspace(1.5, 6.0, settings.bad)
    overexpose(training, which, gains)
    return tiles_of(training, settings.tile), tiles_of(held_out, settings.tile)


class Hiding:
    """Which tiles are hidden: drawn for the whole batch of a step, so that it does not depend on the ranks."""

    def __init__(self, tiles: int, part: float, seed: int) -> None:
        self.tiles, self.count, self.seed = tiles, round(part * tiles), seed

    def __call__(self, step: int, images: int) -> torch.Tensor:
        """[images, tiles], True where a tile is hidden; as many in each image."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        order = torch.rand(images, self.tiles, generator=generator).argsort(dim=1)
        return order < self.count

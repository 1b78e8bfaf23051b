"""Drawn shapes with noise. Sample and augmentation depend on seed, epoch and index only, never on the rank."""

from __future__ import annotations

import numpy as np
import torch
from core.registry import DATASETS
from torch import Tensor
from torch.utils.data import Dataset

KINDS = ("disc", "square", "cross", "ring", "stripes", "triangle")


def draw(kind: str, size: int, x: float, y: float, radius: float) -> np.ndarray:
    """A mask [size, size] of one shape."""
    rows, columns = np.mgrid[0:size, 0:size]
    dx, dy = columns - x, rows - y
    distance = np.hypot(dx, dy)
    masks = {
        "disc": distance < radius,
        "square": (abs(dx) < radius * 0.85) & (abs(dy) < radius * 0.85),
        "cross": ((abs(dx) < radius / 3) | (abs(dy) < radius / 3)) & (distance < radius * 1.2),
        "ring": (distance < radius) & (distance > radius * 0.55),
        "stripes": (rows % 4 < 2) & (distance < radius * 1.2),
        "triangle": (dy < radius * 0.8) & (abs(dx) < (dy + radius) * 0.6),
    }
    return masks[kind].astype(np.float32)


@DATASETS.register("shapes")
class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """A labelled image for each index."""

    def __init__(self, samples: int, image_size: int, noise: float, seed: int, augment: bool = True) -> None:
        self.samples, self.size, self.noise, self.seed, self.augment = samples, image_size, noise, seed, augment
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch augments in another way."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((self.seed, index))
        label = int(rng.integers(len(KINDS)))
        centre = rng.uniform(0.35, 0.65, size=2) * self.size
        mask = draw(KINDS[label], self.size, centre[0], centre[1], rng.uniform(0.2, 0.35) * self.size)
        colour, ground = rng.uniform(0.4, 1.0, size=(3, 1, 1)), rng.uniform(0.0, 0.3, size=(3, 1, 1))
        image = mask * colour + (1 - mask) * ground + rng.normal(0, self.noise, size=(3, self.size, self.size))
        if self.augment:
            change = np.random.default_rng((self.seed, index, self.epoch))
            image = image[:, :, ::-1] if change.random() < 0.5 else image
            image = np.roll(image, change.integers(-1, 2, size=2), axis=(1, 2))
        tensor = torch.from_numpy(np.ascontiguousarray(image, dtype=np.float32)) * 2 - 1
        return tensor, torch.tensor(label)

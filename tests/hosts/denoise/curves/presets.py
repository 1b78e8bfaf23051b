"""Configurations in Python: a preset is a function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Shape(NamedTuple):
    """Of the network."""

    width: int
    blocks: int
    heads: int
    points: int


@dataclass(frozen=True)
class Preset:
    """All that decides what a run computes."""

    shape: Shape
    batch: int  # curves in one step, over all ranks
    pieces: int  # into which a rank cuts its part
    steps: int
    rate: float
    warmup: int
    decay: float
    max_norm: float
    keep: float  # of the averaged weights in one step
    tensor: int  # ranks that share one copy of the matrices
    seed: int = 4
    noises: int = 100


def small() -> Preset:
    """Seconds on a laptop."""
    return Preset(
        shape=Shape(width=32, blocks=2, heads=4, points=16),
        batch=16,
        pieces=2,
        steps=12,
        rate=4e-3,
        warmup=3,
        decay=0.05,
        max_norm=0.7,
        keep=0.9,
        tensor=2,
    )


def medium() -> Preset:
    """Minutes on one GPU."""
    return replace(small(), shape=Shape(256, 6, 8, 64), batch=256, steps=4000, rate=8e-4, warmup=100, keep=0.999)


PRESETS = {"small": small, "medium": medium}

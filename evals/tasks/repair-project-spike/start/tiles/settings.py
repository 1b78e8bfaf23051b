"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .optim import OptimSettings
from .schedule import ScheduleSettings


@dataclass
class ImageSettings:
    side: int = 12
    tile: int = 3
    training: int = 320
    held_out: int = 44
    bad: int = 6  # overexposed ones among the training images
    seed: int = 4


@dataclass
class ModelSettings:
    width: int = 48
    heads: int = 4
    layers: int = 3  # of the encoder
    decoder: int = 1  # layers of the decoder
    hidden: float = 0.6  # the part of the tiles that is hidden


@dataclass
class GuardSettings:
    window: int = 8  # steps that are remembered; 0: no guard
    factor: float = 3.0  # how far above their median a loss may be


@dataclass
class Settings:
    seed: int = 0
    batch: int = 16  # images of a step, over all ranks
    steps: int = 300
    max_norm: float = 1.0
    validate_every: int = 0
    save_every: int = 0
    shard: bool = True
    out: Path = Path("runs/tiles")
    resume: str = ""
    guard: GuardSettings = field(default_factory=GuardSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

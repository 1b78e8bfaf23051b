"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .schedule import ScheduleSettings


@dataclass
class ReaderSettings:
    books: int = 90  # number 0 is no book
    shelves: int = 9  # subjects
    longest: int = 16  # loans that are looked at
    training: int = 240  # readers
    held_out: int = 40
    seed: int = 3


@dataclass
class ModelSettings:
    width: int = 48
    heads: int = 4
    layers: int = 3


@dataclass
class LambSettings:
    lr: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-6
    weight_decay: float = 0.01
    least_ratio: float = 0.05
    most_ratio: float = 10.0


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24
    steps: int = 200
    max_norm: float = 1.0
    smoothing: float = 0.05
    validate_every: int = 0
    save_every: int = 0
    out: Path = Path("runs/shelves")
    resume: str = ""
    readers: ReaderSettings = field(default_factory=ReaderSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    lamb: LambSettings = field(default_factory=LambSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .optim import OptimSettings
from .schedule import ScheduleSettings
from .text import TextSettings


@dataclass
class ModelSettings:
    width: int = 48
    heads: int = 4
    layers: int = 3


@dataclass
class AverageSettings:
    decay: float = 0.98
    warm: bool = True


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24  # documents of a step, over all ranks and micro-batches
    micro_batches: int = 1
    steps: int = 200
    mask: float = 0.3  # the part of the words that is masked
    max_norm: float = 1.0
    shard: bool = True
    evaluate_every: int = 0
    save_every: int = 0
    out: Path = Path("runs/glossa")
    resume: str = ""
    average: AverageSettings = field(default_factory=AverageSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    text: TextSettings = field(default_factory=TextSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

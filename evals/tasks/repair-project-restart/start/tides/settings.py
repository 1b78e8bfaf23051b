"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .optim import OptimSettings
from .schedule import ScheduleSettings


@dataclass
class SeriesSettings:
    hours: int = 1200
    past: int = 48  # hours that the model sees
    future: int = 12  # hours that it forecasts
    windows: int = 120  # of the training part
    held_out: int = 36  # of the last part
    seed: int = 5


@dataclass
class ModelSettings:
    width: int = 48
    heads: int = 4
    layers: int = 3
    patch: int = 6


@dataclass
class CheckpointSettings:
    every: int = 0
    keep: int = 3


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24  # windows of a step, over all ranks
    steps: int = 400
    max_norm: float = 1.0
    decay: float = 0.98  # of the moving average
    evaluate_every: int = 0
    shard: bool = True
    out: Path = Path("runs/tides")
    resume: str = ""
    series: SeriesSettings = field(default_factory=SeriesSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

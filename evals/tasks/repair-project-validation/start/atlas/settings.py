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
class EvaluationSettings:
    every: int = 20
    batch: int = 8
    patience: int = 0  # evaluations without a new best loss after which a run stops; 0: never


@dataclass
class CheckpointSettings:
    every: int = 0
    keep: int = 2


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24  # documents of an optimizer step, over all ranks
    micro_batches: int = 1  # parts in which a rank computes its share
    steps: int = 60
    max_norm: float = 1.0
    shard: bool = True
    out: Path = Path("runs/atlas")
    resume: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    text: TextSettings = field(default_factory=TextSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

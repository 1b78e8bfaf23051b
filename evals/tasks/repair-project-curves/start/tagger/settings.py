"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .optim import OptimSettings
from .schedule import ScheduleSettings


@dataclass
class SentenceSettings:
    words: int = 72
    tags: int = 9
    longest: int = 22
    training: int = 264
    held_out: int = 51
    seed: int = 8


@dataclass
class ModelSettings:
    width: int = 48
    heads: int = 4
    layers: int = 3


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24  # sentences of a step, over all ranks
    micro_batches: int = 1
    steps: int = 80
    max_norm: float = 1.0
    rare: float = 0.5  # a tag's weight is its frequency to the power of -rare
    shard: bool = True
    evaluate_every: int = 0
    checkpoint_every: int = 0
    out: Path = Path("runs/tagger")
    resume: str = ""
    sentences: SentenceSettings = field(default_factory=SentenceSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

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
class Settings:
    seed: int = 0
    batch: int = 16  # dialogues of a step, over all ranks; the last step of an epoch has fewer
    micro_batches: int = 1
    steps: int = 120
    max_norm: float = 1.0
    decay: float = 0.9  # of the averaged weights
    evaluate_every: int = 0
    save_every: int = 0
    out: Path = Path("runs/parley")
    resume: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    text: TextSettings = field(default_factory=TextSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

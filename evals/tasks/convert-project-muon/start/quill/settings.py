"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .optim import OptimSettings
from .schedule import ScheduleSettings
from .text import TextSettings


@dataclass
class ModelSettings:
    width: int = 40
    heads: int = 4
    layers: int = 3
    hidden: int = 0  # 0: twice the width


@dataclass
class MuonSettings:
    lr: float = 0.03
    momentum: float = 0.9
    iterations: int = 5
    weight_decay: float = 0.01


@dataclass
class Settings:
    seed: int = 0
    batch: int = 24  # documents of a step, over all ranks and micro-batches
    micro_batches: int = 1
    steps: int = 160
    max_norm: float = 1.0
    evaluate_every: int = 0
    save_every: int = 0
    out: Path = Path("runs/quill")
    resume: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    text: TextSettings = field(default_factory=TextSettings)
    muon: MuonSettings = field(default_factory=MuonSettings)
    adamw: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)

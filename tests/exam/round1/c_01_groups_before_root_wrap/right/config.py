"""Run configuration. Everything that the other modules need to know lives here."""

from dataclasses import dataclass, field


@dataclass
class ModelConfig:
    vocab: int = 32
    dim: int = 24
    heads: int = 2
    layers: int = 2
    seq: int = 12


@dataclass
class OptimConfig:
    lr: float = 0.25
    head_lr_scale: float = 0.5
    weight_decay: float = 1e-3
    momentum: float = 0.9
    warmup: int = 4


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: int = 30
    global_batch: int = 32
    seed: int = 7
    wrap: tuple = ("Block",)

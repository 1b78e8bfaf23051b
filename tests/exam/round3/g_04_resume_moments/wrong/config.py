from dataclasses import dataclass


@dataclass
class Config:
    vocab: int = 36
    dim: int = 24
    layers: int = 2
    context: int = 16
    global_batch: int = 16
    lr: float = 6e-3
    min_lr: float = 6e-4
    warmup: int = 4
    steps: int = 30
    clip: float = 1.0
    seed: int = 42

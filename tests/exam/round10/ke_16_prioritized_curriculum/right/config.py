from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    samples: int = 192
    length: int = 12
    vocab: int = 20
    dim: int = 32
    batch: int = 16
    steps: int = 32
    warmup: int = 6
    lr: float = 0.15
    momentum: float = 0.85
    smooth: float = 0.5
    temperature: float = 0.7
    seed: int = 3

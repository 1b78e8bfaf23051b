from dataclasses import dataclass


@dataclass
class Config:
    steps: int = 80
    batch: int = 128
    lr: float = 2e-3
    width: int = 64
    depth: int = 3
    eval_every: int = 40
    seed: int = 0

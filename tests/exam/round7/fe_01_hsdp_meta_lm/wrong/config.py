from dataclasses import dataclass


@dataclass
class Config:
    vocab: int = 48
    dim: int = 32
    heads: int = 4
    layers: int = 2
    seq_len: int = 24
    batch_size: int = 16          # global
    steps: int = 16
    lr: float = 3e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 1234

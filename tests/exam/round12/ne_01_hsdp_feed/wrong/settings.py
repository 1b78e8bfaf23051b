from dataclasses import dataclass


@dataclass
class RankerSettings:
    n_fields: int = 6
    buckets: int = 40
    dim: int = 24
    layers: int = 2
    rows: int = 768
    batch: int = 32
    steps: int = 28
    lr: float = 4e-3
    weight_decay: float = 0.02
    seed: int = 1311
    out: str = ""
    save_every: int = 0
    resume: str = ""

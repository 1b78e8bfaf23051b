from dataclasses import dataclass


@dataclass
class Config:
    epochs: int = 4
    images: int = 512
    global_batch: int = 64
    micro_batch: int = 8
    lr: float = 4e-3
    min_lr: float = 1e-5
    warmup: int = 4
    weight_decay: float = 0.05
    seed: int = 11
    save_every: int = 0
    out: str = "ckpt"
    resume: str = ""
    export: str = ""

from dataclasses import dataclass, field


@dataclass
class OptimConfig:
    lr: float = 6e-3
    weight_decay: float = 0.3
    betas: tuple = (0.9, 0.95)
    no_decay: tuple = ("bias", "norm", "scale")


@dataclass
class Config:
    steps: int = 24
    batch: int = 48
    dim: int = 16
    hidden: int = 32
    depth: int = 3
    save_every: int = 0
    out: str = ""
    resume: str = ""
    optim: OptimConfig = field(default_factory=OptimConfig)

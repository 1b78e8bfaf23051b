from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    name: str
    task: str            # "reconstruct" or "classify"
    train: tuple         # parts of the model that learn
    steps: int
    lr: float


@dataclass
class Config:
    features: int = 24
    dim: int = 32
    hidden: int = 64
    depth: int = 2
    classes: int = 5
    batch: int = 48
    eval_rows: int = 301
    eval_every: int = 4
    tp: int = 2
    seed: int = 2024
    phases: list = field(default_factory=lambda: [
        Phase("pretrain", "reconstruct", ("encoder", "decoder"), 10, 4e-3),
        Phase("probe", "classify", ("classifier",), 6, 1e-2),
        Phase("finetune", "classify", ("encoder", "classifier"), 8, 2e-3),
    ])

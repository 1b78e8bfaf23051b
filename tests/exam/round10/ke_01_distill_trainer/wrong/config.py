from dataclasses import dataclass


@dataclass
class DistillConfig:
    vocab: int = 48
    max_len: int = 24
    student_dim: int = 32
    student_layers: int = 2
    teacher_dim: int = 64
    teacher_layers: int = 2
    global_batch: int = 16
    accum: int = 2
    steps: int = 24
    lr: float = 3e-3
    temperature: float = 2.0
    alpha: float = 0.7
    max_norm: float = 1.0
    seed: int = 1234

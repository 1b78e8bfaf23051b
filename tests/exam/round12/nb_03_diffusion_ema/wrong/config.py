from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    image: int = 8
    width: int = 32
    depth: int = 2
    timesteps: int = 50
    steps: int = 48
    batch: int = 16
    lr: float = 1e-3
    ema_decay: float = 0.99
    ema_dtype: torch.dtype = torch.bfloat16
    seed: int = 0

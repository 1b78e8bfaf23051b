"""The optimizer with its two groups, and the schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .config import Optim


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and the embedding do not."""
    decay, plain = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (plain if "norm" in name or name.startswith("embedding") else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps)


def cosine(step: int, warmup: int, steps: int, floor: float) -> float:
    """The factor of the learning rate at a step: up in a line, down in half a cosine, never below the floor."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def build_scheduler(optimizer: torch.optim.Optimizer, config: Optim, steps: int) -> LambdaLR:
    """Steps once for each optimizer step."""
    return LambdaLR(optimizer, lambda step: cosine(step, config.warmup, steps, config.min_ratio))

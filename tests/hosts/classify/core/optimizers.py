"""Parameter groups, optimizers and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .registry import OPTIMIZERS, SCHEDULES


def groups(model: nn.Module, lr: float, head_lr_factor: float, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: the backbone, whose matrices decay, and the head with its own rate."""
    backbone, head = [], []
    for name, parameter in model.named_parameters():
        (head if name.startswith("head.") else backbone).append(parameter)
    return [
        {"params": backbone, "lr": lr, "weight_decay": weight_decay},
        {"params": head, "lr": lr * head_lr_factor, "weight_decay": 0.0},
    ]


@OPTIMIZERS.register("sgd")
def sgd(
    model: nn.Module, lr: float, head_lr_factor: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum."""
    return torch.optim.SGD(groups(model, lr, head_lr_factor, weight_decay), lr=lr, momentum=momentum, nesterov=True)


@OPTIMIZERS.register("adamw")
def adamw(model: nn.Module, lr: float, head_lr_factor: float = 1.0, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(groups(model, lr, head_lr_factor, weight_decay), lr=lr)


@SCHEDULES.register("warmup_poly")
def warmup_poly(optimizer: torch.optim.Optimizer, steps: int, warmup: int, power: float = 1.0) -> LambdaLR:
    """A linear warm-up, then a polynomial to zero at the last step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, 1 - (step - warmup) / (steps - warmup)) ** power

    return LambdaLR(optimizer, factor)

"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class OptimSettings:
    kind: str = "adamw"
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    embedding_lr: float = 1.0  # the factor of the embeddings' rate


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), with decoupled weight decay."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                update = momentum.lerp(p.grad, 1 - fast).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - slow)


def kind_of(name: str, parameter: nn.Parameter) -> str:
    """Matrices decay; gains and biases do not; embeddings do not and may have their own rate."""
    if "embed" in name or "tokens" in name:
        return "embedding"
    return "matrix" if parameter.ndim >= 2 else "vector"


def groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """One group a kind, those that have no parameter left out."""
    by_kind: dict[str, list[nn.Parameter]] = {"matrix": [], "vector": [], "embedding": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_kind[kind_of(name, parameter)].append(parameter)
    options = {
        "matrix": {"weight_decay": settings.weight_decay},
        "vector": {"weight_decay": 0.0},
        "embedding": {"weight_decay": 0.0, "lr": settings.lr * settings.embedding_lr},
    }
    return [{"params": params, **options[kind]} for kind, params in by_kind.items() if params]


def make(model: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """To be called after the model was sharded: the optimizer must hold the parameters that are trained."""
    own = groups(model, settings)
    betas = (settings.beta1, settings.beta2)
    if settings.kind == "adamw":
        return torch.optim.AdamW(own, lr=settings.lr, betas=betas, eps=settings.eps)
    if settings.kind == "lion":
        return Lion(own, lr=settings.lr, betas=betas, weight_decay=settings.weight_decay)
    if settings.kind == "sgd":
        return torch.optim.SGD(own, lr=settings.lr, momentum=settings.momentum)
    raise ValueError(f"optim.kind: {settings.kind} is none of adamw, lion, sgd")

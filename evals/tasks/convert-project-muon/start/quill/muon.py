"""Muon (Jordan et al. 2024): momentum whose matrix is made orthogonal before it is added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import optim
from .model import Writer
from .settings import Settings

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """About the nearest matrix whose singular values are one, by a quintic Newton-Schulz iteration."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def spread(matrix: torch.Tensor) -> float:
    """How far from orthogonal: 0 if all singular values are alike."""
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    square = rows @ rows.T
    size = square.diagonal().mean()
    return ((square / size - torch.eye(len(square))).norm() / len(square) ** 0.5).item()


class Muon(torch.optim.Optimizer):
    """For matrices only. `spreads` has the last step's spread of each."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, iterations: int, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "iterations": iterations, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.spreads: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.spreads = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                velocity = state["velocity"]
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                ahead = parameter.grad + group["momentum"] * velocity  # Nesterov
                update = orthogonal(ahead, group["iterations"])
                self.spreads.append(spread(update))
                rows, columns = parameter.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-rate)


def make(model: Writer, settings: Settings) -> tuple[Muon, torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, head and gains."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    own = settings.muon
    muon = Muon(matrices, own.lr, own.momentum, own.iterations, own.weight_decay)
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    betas = (settings.adamw.beta1, settings.adamw.beta2)
    adamw = torch.optim.AdamW(others, lr=settings.adamw.lr, betas=betas, weight_decay=settings.adamw.weight_decay)
    return muon, adamw


def describe(model: Writer) -> str:
    """How many parameters each of the optimizers has."""
    names = {name: p.numel() for name, p in model.named_parameters()}
    by_kind: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        muon = name.startswith("blocks.") and optim.kind_of(name, parameter) == "matrix"
        kind = "Muon" if muon else "AdamW"
        by_kind[kind] = by_kind.get(kind, 0) + names[name]
    return ", ".join(f"{count / 1e3:.1f}k by {kind}" for kind, count in sorted(by_kind.items()))

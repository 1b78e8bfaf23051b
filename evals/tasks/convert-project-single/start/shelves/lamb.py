"""LAMB (You et al. 2019): Adam whose step for each tensor is scaled by the ratio of the tensor's norm to the step's norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .settings import LambSettings


class Lamb(torch.optim.Optimizer):
    """`ratios` has the last step's ratio of each tensor, for the log."""

    def __init__(self, params: Iterable[Any], settings: LambSettings) -> None:
        defaults = {
            "lr": settings.lr,
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "bounds": (settings.least_ratio, settings.most_ratio),
            "adapt": True,
        }
        super().__init__(params, defaults)
        self.ratios: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.ratios = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, group)

    def change(self, parameter: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        fast, slow = group["betas"]
        state["mean"].mul_(fast).add_(grad, alpha=1 - fast)
        state["square"].mul_(slow).addcmul_(grad, grad, value=1 - slow)
        count = state["step"].item()
        mean = state["mean"] / (1 - fast**count)
        square = state["square"] / (1 - slow**count)
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        ratio = self.ratio(parameter, update, group["bounds"]) if group["adapt"] else 1.0
        self.ratios.append(ratio)
        parameter.add_(update, alpha=-group["lr"] * ratio)

    @staticmethod
    def ratio(parameter: torch.Tensor, update: torch.Tensor, bounds: tuple[float, float]) -> float:
        """How large the tensor is compared with its update, within bounds; 1 if one of them is zero."""
        size, change = length(parameter), length(update)
        if not size or not change:
            return 1.0
        return min(max(size / change, bounds[0]), bounds[1])


def length(tensor: torch.Tensor) -> float:
    """The norm, added up in double precision."""
    return tensor.double().square().sum().sqrt().item()


def make(model: nn.Module, settings: LambSettings) -> Lamb:
    """Vectors (gains, popularity) neither decay nor adapt."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return Lamb(
        [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0, "adapt": False, "lr": 0.1 * settings.lr},
        ],
        settings,
    )

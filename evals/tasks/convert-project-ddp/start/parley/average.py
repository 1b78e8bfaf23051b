"""The averaged weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Average:
    """Exponential moving average. In the first steps its memory is shorter."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 2))
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter, 1 - decay)

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.put(self.weights, model)
        try:
            yield
        finally:
            self.put(own, model)

    @staticmethod
    @torch.no_grad()
    def put(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)

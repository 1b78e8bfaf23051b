"""A moving average of the weights. It is kept in shards: each rank averages what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .parallel import whole


class Average:
    """Exponential moving average with a warm-up: the decay grows with the number of updates until it is `decay`."""

    def __init__(self, model: nn.Module, decay: float = 0.999, warm: bool = True) -> None:
        self.decay, self.warm = decay, warm
        self.updates = 0
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def rate(self) -> float:
        if not self.warm:
            return self.decay
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """To be called after each optimizer step."""
        rate = self.rate()
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 1 - rate)
        self.updates += 1

    @contextlib.contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """The model has the averaged weights inside of the `with`, its own ones after it."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.copy(self.values, model)
        try:
            yield
        finally:
            self.copy(own, model)

    @staticmethod
    @torch.no_grad()
    def copy(values: dict[str, torch.Tensor], model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])

    def full(self) -> dict[str, torch.Tensor]:
        """Whole tensors, for a file; to be called on every rank."""
        return {name: whole(value).clone() for name, value in self.values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        with torch.no_grad():
            for name, value in state["values"].items():
                self.values[name].copy_(value)

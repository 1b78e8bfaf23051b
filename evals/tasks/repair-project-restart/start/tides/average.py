"""The moving average of the weights: what we deliver. Each rank averages its shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .parallel import whole


class MovingAverage:
    """Its memory grows with the number of updates, so that it does not carry the initial weights along for long."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.updates = 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 3))
        for name, parameter in self.model.named_parameters():
            self.weights[name].mul_(decay).add_(parameter.detach(), alpha=1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside of the `with` the model has the averaged weights."""
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.put(self.weights)
        try:
            yield
        finally:
            self.put(own)

    @torch.no_grad()
    def put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def full(self) -> dict[str, torch.Tensor]:
        """Plain tensors; on every rank, as it gathers."""
        return {name: whole(weight).clone() for name, weight in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in state.items():
            self.weights[name].copy_(weight)

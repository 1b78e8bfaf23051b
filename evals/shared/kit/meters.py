"""Sums and means of numbers that come in parts: over batches, micro-batches and ranks."""

from __future__ import annotations

import math
from collections import deque

import torch

from . import comm


class Mean:
    """The mean of many values with weights, over all that every rank has added."""

    def __init__(self) -> None:
        self.sum, self.weight = 0.0, 0.0

    def add(self, sum: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """A sum of values, and the number of them (or of their weights)."""
        self.sum += float(sum)
        self.weight += float(weight)

    def over_ranks(self) -> float:
        """To be called on every rank."""
        sum, weight = comm.total(self.sum, self.weight)
        return sum / weight if weight else math.nan


class Meters:
    """Several means under their names."""

    def __init__(self, *names: str) -> None:
        self.means = {name: Mean() for name in names}

    def add(self, weight: torch.Tensor | float, **sums: torch.Tensor | float) -> None:
        for name, value in sums.items():
            self.means[name].add(value, weight)

    def over_ranks(self) -> dict[str, float]:
        return {name: mean.over_ranks() for name, mean in self.means.items()}


class Window:
    """The last values of a number."""

    def __init__(self, length: int) -> None:
        self.values: deque[float] = deque(maxlen=length)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def full(self) -> bool:
        return len(self.values) == self.values.maxlen

    def median(self) -> float:
        ordered = sorted(self.values)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.values.clear()
        self.values.extend(state["values"])

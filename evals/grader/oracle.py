"""The right answer and how far rounding alone may lead away from it.

The oracle is a script in plain torch that runs in one process. It runs again from initial weights
that are one unit in the last place away: what that changes, times MULTIPLE, plus FLOOR, is what a
right solution may differ by, for each tensor and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .record import Record, Tensors, renamed

MULTIPLE = 16.0
FLOOR = 2.0**-15
PERTURBED = 2


@dataclass(frozen=True)
class Deviation:
    """The largest ratio of a deviation to its limit."""

    ratio: float
    what: str
    measured: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what} off by {self.measured:.1e}, allowed {self.limit:.1e}"


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, computed once for each object and arguments."""

    @functools.wraps(method)
    def call(self: Oracle, *args: Any) -> Any:
        key = (method.__name__, *args)
        if key not in self.known:
            self.known[key] = method(self, *args)
        return self.known[key]

    return call


@dataclass(frozen=True)
class Oracle:
    """The oracle's run and its perturbed repetitions."""

    run: Record
    perturbed: tuple[Record, ...]
    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.run.steps

    @functools.cached_property
    def trainable(self) -> list[str]:
        return [name for name, piece in self.run.parameters(0)[0].items() if piece["trainable"]]

    @remembered
    def update(self, step: int) -> Tensors:
        """What the steps up to this one changed."""
        before, after = self.run.weights(0), self.run.weights(step)
        return {name: after[name] - before[name] for name in self.trainable}

    @remembered
    def grads(self, step: int) -> Tensors:
        return self.run.grads(step)

    @remembered
    def limits(self, what: str, step: int) -> dict[str, float]:
        """The allowed deviation of each tensor, as a part of its size."""
        result: dict[str, float] = {}
        right = self.right(what, step)
        for other in self.perturbed:
            begin = other.weights(0)
            wrong = other.grads(step) if what == "gradient" else other.weights(step)
            for name, tensor in right.items():
                moved = wrong[name] if what == "gradient" else wrong[name] - begin[name]
                result[name] = max(result.get(name, 0.0), distance(moved, tensor))
        return {name: MULTIPLE * value + FLOOR for name, value in result.items()}

    def right(self, what: str, step: int) -> Tensors:
        tensors: Tensors = self.grads(step) if what == "gradient" else self.update(step)
        return tensors

    def deviation(self, run: Record, offset: int = 0) -> Deviation:
        """The worst of all gradients and updates of a run that began after step `offset` of the
        oracle.
        """
        worst = Deviation(0.0, "nothing", 0.0, 0.0)
        begin = self.run.weights(0)
        for step in range(offset + 1, self.steps + 1):
            for what in ("gradient", "update"):
                right = self.right(what, step)
                if what == "gradient":
                    own = renamed(run.grads(step - offset), list(right))
                else:
                    own = renamed(run.weights(step - offset), list(right))
                    own = {
                        name: tensor.reshape(begin[name].shape) - begin[name]
                        for name, tensor in own.items()
                    }
                for name, limit in self.limits(what, step).items():
                    measured = distance(own[name], right[name])
                    if not measured / limit <= worst.ratio:
                        worst = Deviation(
                            measured / limit, f"{what} of {name} at step {step}", measured, limit
                        )
            if worst.ratio > 1 or worst.ratio != worst.ratio:
                break  # the first step that is off says most
        return worst


def distance(own: torch.Tensor, right: torch.Tensor) -> float:
    """|own - right| / |right|."""
    own, right = own.double().reshape(-1), right.double().reshape(-1)
    if own.shape != right.shape:
        return float("inf")
    size = float(right.norm())
    apart = float((own - right).norm())
    return apart / size if size else (0.0 if apart == 0 else float("inf"))

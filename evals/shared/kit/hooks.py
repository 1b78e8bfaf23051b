"""Hooks: what happens beside the training, at fixed points of it. A trainer calls them in the order of its list."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import comm
from .journal import Journal, say


class Hook:
    """Override what is needed. Every hook is called on every rank, so a hook may use collectives if all ranks come to them."""

    def on_start(self, trainer: Any) -> None: ...

    def on_step(self, trainer: Any, numbers: dict[str, float]) -> None:
        """After an optimizer step; `numbers` are of the whole step, the same on every rank."""

    def on_evaluation(self, trainer: Any, numbers: dict[str, float]) -> None: ...

    def on_end(self, trainer: Any) -> None: ...


class Every(Hook):
    """Calls a function every so many steps, and after the last one if asked to."""

    def __init__(self, steps: int, call: Callable[[], Any], at_end: bool = False) -> None:
        self.steps, self.call, self.at_end = steps, call, at_end
        self.last = -1

    def on_step(self, trainer: Any, numbers: dict[str, float]) -> None:
        if self.steps and trainer.step % self.steps == 0:
            self.last = trainer.step
            self.call()

    def on_end(self, trainer: Any) -> None:
        if self.at_end and self.last != trainer.step:
            self.call()


class Writes(Hook):
    """The numbers of steps and evaluations, in two files of the run's folder."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def on_start(self, trainer: Any) -> None:
        self.training = Journal(self.folder, "train.jsonl", first=trainer.step, console=True)
        self.validation = Journal(self.folder, "val.jsonl", first=trainer.step, console=True)

    def on_step(self, trainer: Any, numbers: dict[str, float]) -> None:
        self.training.write(trainer.step, **numbers)

    def on_evaluation(self, trainer: Any, numbers: dict[str, float]) -> None:
        self.validation.write(trainer.step, **numbers)


class StopsOnNaN(Hook):
    """All ranks see the same numbers, so all of them stop."""

    def on_step(self, trainer: Any, numbers: dict[str, float]) -> None:
        if not math.isfinite(numbers["loss"]):
            raise FloatingPointError(f"the loss of step {trainer.step} is {numbers['loss']}")


class Speed(Hook):
    """Steps per second over the last ones, on the console now and then."""

    def __init__(self, every: int = 50, window: int = 20) -> None:
        self.every = every
        self.times: deque[float] = deque(maxlen=window)

    def on_start(self, trainer: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step(self, trainer: Any, numbers: dict[str, float]) -> None:
        self.times.append(time.perf_counter())
        if trainer.step % self.every == 0 and len(self.times) > 1:
            rate = (len(self.times) - 1) / (self.times[-1] - self.times[0])
            say(f"{rate:.1f} steps a second on {comm.world()} ranks")


class Best(Hook):
    """Remembers the smallest value of a validation number and calls a function when there is a new one."""

    def __init__(self, key: str, call: Callable[[], Any] | None = None, patience: int = 0) -> None:
        self.key, self.call, self.patience = key, call, patience
        self.value, self.since = math.inf, 0

    def on_evaluation(self, trainer: Any, numbers: dict[str, float]) -> None:
        if numbers[self.key] < self.value:
            self.value, self.since = numbers[self.key], 0
            if self.call:
                self.call()
            return
        self.since += 1
        if self.patience and self.since >= self.patience:
            trainer.stopping = True
            say(f"{self.key} has not improved in {self.since} evaluations")

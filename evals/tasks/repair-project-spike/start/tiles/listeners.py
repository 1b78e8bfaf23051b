"""What happens beside the training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import comm, config
from .journal import Journal, say
from .parallel import describe

if TYPE_CHECKING:
    from .pretraining import Pretraining


def writes(run: Pretraining) -> None:
    """settings.yaml, train.jsonl and val.jsonl in the run's folder."""
    events, settings = run.events, run.settings
    journals: dict[str, Journal] = {}

    @events.on("begin")
    def begin() -> None:
        say(describe(run.model))
        for name in ("train", "val"):
            journals[name] = Journal(settings.out, f"{name}.jsonl", first=run.step, console=True)
        if comm.is_main():
            config.write(settings, settings.out / "settings.yaml")

    @events.on("step")
    def step(loss: float, norm: float, rate: float) -> None:
        journals["train"].write(run.step, loss=loss, norm=norm, lr=rate, skipped=0)

    @events.on("skip")
    def skip(loss: float) -> None:
        journals["train"].write(run.step, loss=loss, skipped=1)

    @events.on("validation")
    def validation(**numbers: float) -> None:
        journals["val"].write(run.step, **numbers)


def watches(run: Pretraining) -> None:
    """A run whose loss is no number ends; the mean loss over all ranks is the same on each, so all of them end."""

    @run.events.on("step")
    def step(loss: float, norm: float, rate: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {run.step} is {loss}")

    @run.events.on("end")
    def end() -> None:
        say(f"{run.guard.skipped} of {run.step} steps were skipped")


ALL = (writes, watches)

"""Those who watch a training."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

from . import config
from .events import Began, Due, Ended, Event, Stepped, Validated
from .loop import Run


class Observer:
    def see(self, event: Event) -> None:
        """Calls `began`, `stepped`, ... if there is such a method."""
        method = getattr(self, type(event).__name__.lower(), None)
        if method:
            method(event)


class Console(Observer):
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def began(self, event: Began) -> None:
        print(f"{event.parameters / 1e3:.1f}k parameters, from step {event.step}", flush=True)

    def stepped(self, event: Stepped) -> None:
        print(f"{event.step:>6}  loss {event.loss:.4f}  norm {event.norm:.3f}  ratio {event.ratio:.3f}", flush=True)

    def validated(self, event: Validated) -> None:
        print(f"{event.step:>6}  " + "  ".join(f"{k} {v:.4f}" for k, v in event.numbers.items()), flush=True)

    def ended(self, event: Ended) -> None:
        print(f"{event.step} steps, {time.perf_counter() - self.at:.0f} s", flush=True)


class Files(Observer):
    """settings.yaml, train.jsonl and val.jsonl in the run's folder; after a resume lines are appended."""

    def __init__(self, run: Run) -> None:
        self.folder = run.settings.out
        self.folder.mkdir(parents=True, exist_ok=True)
        config.write(run.settings, self.folder / "settings.yaml")
        if not run.step:
            for name in ("train", "val"):
                (self.folder / f"{name}.jsonl").write_text("", encoding="utf-8")

    def stepped(self, event: Stepped) -> None:
        self.append("train", dataclasses.asdict(event))

    def validated(self, event: Validated) -> None:
        self.append("val", {"step": event.step, **event.numbers})

    def append(self, name: str, row: dict[str, Any]) -> None:
        with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class Alarm(Observer):
    def stepped(self, event: Stepped) -> None:
        if not math.isfinite(event.loss):
            raise FloatingPointError(f"the loss of step {event.step} is {event.loss}")


class Saves(Observer):
    def __init__(self, run: Run) -> None:
        self.run = run

    def due(self, event: Due) -> None:
        self.run.save(self.run.settings.out / f"step_{event.step}.pt")

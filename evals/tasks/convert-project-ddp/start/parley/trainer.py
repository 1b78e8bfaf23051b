"""The trainer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import comm, config, hooks, optim, schedule
from .average import Average
from .dialogues import Dialogues, Pair
from .journal import say
from .model import DialogueModel
from .settings import Settings
from .snapshots import Snapshots
from .text import IGNORED
from .validation import validate


class Counter:
    """The number of steps that were made."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.plain = DialogueModel(settings)
        self.model = DistributedDataParallel(self.plain)
        self.optimizer = optim.make(self.plain, settings.optim)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.average = Average(self.plain, settings.decay)
        self.dialogues = Dialogues(settings)
        self.snapshots = Snapshots(settings.out)
        self.count = Counter()
        self.hooks = [
            hooks.StopsOnNaN(),
            hooks.Writes(settings.out),
            hooks.Speed(),
            hooks.Every(settings.evaluate_every, self.evaluate),
            hooks.Every(settings.save_every, self.save),
        ]

    @property
    def step(self) -> int:
        return self.count.step

    @property
    def others(self) -> dict[str, Any]:
        """What is saved beside model and optimizer."""
        return {
            "schedule": self.schedule,
            "average": self.average,
            "dialogues": self.dialogues,
            "count": self.count,
        }

    def fit(self) -> None:
        if comm.is_main():
            self.settings.out.mkdir(parents=True, exist_ok=True)
            config.write(self.settings, self.settings.out / "settings.yaml")
        say(f"{sum(p.numel() for p in self.plain.parameters()) / 1e3:.1f}k parameters on {comm.world()} ranks")
        self.call("on_start")
        while self.step < self.settings.steps:
            numbers = self.update(next(self.steps))
            self.count.step += 1
            self.call("on_step", numbers)
        self.call("on_end")
        if comm.is_main():
            torch.save(self.average.weights, self.settings.out / "average.pt")
        comm.wait()

    @property
    def steps(self) -> Any:
        if not hasattr(self, "_steps"):
            self._steps = self.dialogues.steps()
        return self._steps

    def update(self, pieces: list[Pair]) -> dict[str, float]:
        """One optimizer step."""
        self.optimizer.zero_grad()
        [words] = comm.total(sum(int((targets != IGNORED).sum()) for _, targets in pieces))
        losses = 0.0
        for number, (inputs, targets) in enumerate(pieces, 1):
            last = number == len(pieces)
            with contextlib.nullcontext() if last else self.model.no_sync():
                logits = self.model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                (loss * comm.world() / words).backward()  # DDP averages over the ranks
            losses += loss.item()
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.settings.max_norm)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.average.update(self.plain)
        return {"loss": comm.total(losses)[0] / words, "norm": norm.item(), "lr": rate}

    def evaluate(self) -> None:
        """Rank 0 evaluates, the others wait."""
        numbers = None
        if comm.is_main():
            with self.average.applied_to(self.plain):
                numbers = validate(self.plain, self.dialogues.held_out)
        self.call("on_evaluation", comm.from_main(numbers))

    def call(self, name: str, *numbers: dict[str, float]) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *numbers)

    def save(self) -> None:
        self.snapshots.save(self.step, self.plain, self.optimizer, self.others)

    def resume(self, path: str) -> None:
        self.snapshots.load(path, self.plain, self.optimizer, self.others)
        say(f"goes on after step {self.step}")

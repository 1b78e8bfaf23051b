"""A run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import comm, config, hooks, muon, schedule
from .held_out import held_out
from .journal import say
from .model import Writer
from .sampling import Batches, part
from .settings import Settings
from .text import IGNORED, corpora, next_words, padded


class Press:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.writer = Writer(settings)
        self.model = DistributedDataParallel(self.writer)
        self.optimizers = muon.make(self.writer, settings)
        self.schedules = [schedule.make(optimizer, settings.schedule) for optimizer in self.optimizers]
        training, validation = corpora(settings.text)
        self.training = padded(training, settings.text.length)
        self.validation = padded(validation, settings.text.length)
        self.batches = Batches(len(self.training), settings.batch, settings.seed)
        self.step = 0
        self.hooks = [
            hooks.StopsOnNaN(),
            hooks.Writes(settings.out),
            hooks.Speed(),
            hooks.Every(settings.evaluate_every, self.evaluate),
            hooks.Every(settings.save_every, self.save),
        ]

    def run(self) -> None:
        settings = self.settings
        if comm.is_main():
            settings.out.mkdir(parents=True, exist_ok=True)
            config.write(settings, settings.out / "settings.yaml")
        say(muon.describe(self.writer))
        self.call("on_start")
        for indices in self.batches:
            if self.step == settings.steps:
                break
            numbers = self.update(indices)
            self.step += 1
            self.call("on_step", numbers)
        self.call("on_end")
        if comm.is_main():
            torch.save(self.writer.state_dict(), settings.out / "weights.pt")
        comm.wait()

    def update(self, indices: torch.Tensor) -> dict[str, float]:
        """One step of both optimizers, on the mean loss over the words of all ranks."""
        pieces = [next_words(self.training[own]) for own in part(indices, self.settings.micro_batches)]
        [words] = comm.total(sum(int((targets != IGNORED).sum()) for _, targets in pieces))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = 0.0
        for number, (inputs, targets) in enumerate(pieces, 1):
            with contextlib.nullcontext() if number == len(pieces) else self.model.no_sync():
                logits = self.model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                (loss * comm.world() / words).backward()
            losses += loss.item()
        norm = nn.utils.clip_grad_norm_(self.writer.parameters(), self.settings.max_norm)
        rate = self.schedules[0].get_last_lr()[0]
        for optimizer, schedule_ in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule_.step()
        spread = fmean(self.optimizers[0].spreads)
        return {"loss": comm.total(losses)[0] / words, "norm": norm.item(), "lr": rate, "spread": spread}

    def evaluate(self) -> None:
        self.call("on_evaluation", held_out(self.writer, self.validation))

    def call(self, name: str, *numbers: dict[str, float]) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *numbers)

    def save(self) -> None:
        """Rank 0 writes all of it."""
        path = self.settings.out / f"step_{self.step}"
        if comm.is_main():
            path.mkdir(parents=True, exist_ok=True)
            state = {
                "model": self.writer.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                **self.small(),
            }
            torch.save(state, path / "state.pt")
        comm.wait()
        say(f"saved {path}")

    def load(self, path: str) -> None:
        state = torch.load(Path(path) / "state.pt", weights_only=True)
        self.writer.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.restore(state)
        say(f"goes on after step {self.step}")

    def small(self) -> dict[str, Any]:
        """What is saved beside weights and moments."""
        return {
            "schedules": [one.state_dict() for one in self.schedules],
            "batches": self.batches.state_dict(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for one, own in zip(self.schedules, state["schedules"], strict=True):
            one.load_state_dict(own)
        self.batches.load_state_dict(state["batches"])
        self.step = state["step"]

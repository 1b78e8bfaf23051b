"""A training, from its settings to the average that it leaves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from . import comm, config, hooks, optim, parallel, schedule
from .clipping import clip
from .ema import Average
from .journal import say
from .masking import Documents, Masked
from .model import MaskedModel
from .sampling import Batches
from .settings import Settings
from .store import Counter, Store
from .validation import Validation


class Training:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.documents = Documents(settings)
        torch.manual_seed(settings.seed)
        self.model = MaskedModel(settings)
        if settings.shard:
            parallel.shard(self.model, self.model.blocks)
        self.optimizer = optim.make(self.model, settings.optim)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.average = Average(self.model, settings.average.decay, settings.average.warm)
        self.batches = Batches(len(self.documents.training), settings.batch, settings.seed)
        self.validation = Validation(self.documents)
        self.count = Counter(step=0, masked=0)
        self.store = Store(settings.out)
        self.hooks = [
            hooks.StopsOnNaN(),
            hooks.Writes(settings.out),
            hooks.Speed(),
            hooks.Every(settings.evaluate_every, self.validate),
            hooks.Every(settings.save_every, self.save),
        ]

    @property
    def step(self) -> int:
        return self.count["step"]

    def run(self) -> None:
        if comm.is_main():
            self.settings.out.mkdir(parents=True, exist_ok=True)
            config.write(self.settings, self.settings.out / "settings.yaml")
        say(parallel.describe(self.model))
        self.call("on_start")
        for indices in self.batches:
            if self.step == self.settings.steps:
                break
            numbers = self.update(self.documents.of_step(self.step, indices))
            self.count.add("step")
            self.call("on_step", numbers)
        self.call("on_end")
        weights = self.average.full()
        if comm.is_main():
            torch.save(weights, self.settings.out / "average.pt")
        comm.wait()

    def update(self, pieces: list[Masked]) -> dict[str, float]:
        """One optimizer step."""
        self.optimizer.zero_grad()
        [masked] = comm.total(sum(piece.count for piece in pieces))
        losses = 0.0
        for number, piece in enumerate(pieces, 1):
            self.communicate(number == len(pieces))
            logits = self.model(piece.inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), piece.targets.flatten(), reduction="sum")
            losses += loss.item()
            (loss / masked * comm.world()).backward()
        norm = clip(self.model, self.settings.max_norm, self.settings.shard)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.average.update(self.model)
        self.count.add("masked", int(masked))
        return {"loss": comm.total(losses)[0] / masked, "norm": norm, "lr": rate}

    def communicate(self, now: bool) -> None:
        """Gradients are reduced with the last micro-batch of a step."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now)

    def validate(self) -> None:
        with self.average.in_place_of(self.model):
            numbers = self.validation(self.model)
        self.call("on_evaluation", numbers)

    def call(self, name: str, *numbers: dict[str, float]) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *numbers)

    @property
    def others(self) -> dict[str, Any]:
        """What is saved beside model and optimizer."""
        return {
            "schedule": self.schedule,
            "average": self.average,
            "batches": self.batches,
            "count": self.count,
        }

    def save(self) -> None:
        self.store.save(self.step, self.model, self.optimizer, self.others)

    def resume(self, path: str) -> None:
        self.store.load(path, self.model, self.optimizer, self.others)
        say(f"goes on after step {self.step}")

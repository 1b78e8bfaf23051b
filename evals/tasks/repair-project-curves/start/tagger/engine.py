"""The engine: state of a run, its steps and what is done between them."""

from __future__ import annotations

from typing import Any

import torch

from . import comm, config, hooks, optim, parallel, schedule
from .gradients import centralise, clip
from .journal import say
from .losses import TagLoss
from .model import Tagger
from .sampling import Batches
from .scores import scores
from .sentences import Treebank, treebanks
from .settings import Settings
from .store import Counter, Store


class Engine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.training, self.held_out = treebanks(settings.sentences)
        self.loss = TagLoss(self.training, settings.sentences.tags, settings.rare)
        torch.manual_seed(settings.seed)
        self.model = Tagger(settings)
        if settings.shard:
            parallel.shard(self.model, self.model.blocks)
        self.optimizer = optim.make(self.model, settings.optim)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.batches = Batches(len(self.training), settings.batch, settings.seed)
        self.count = Counter(step=0)
        self.store = Store(settings.out)
        self.hooks = [
            hooks.StopsOnNaN(),
            hooks.Writes(settings.out),
            hooks.Every(settings.evaluate_every, self.evaluate),
            hooks.Every(settings.checkpoint_every, self.save),
        ]

    @property
    def step(self) -> int:
        return self.count["step"]

    @property
    def others(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "batches": self.batches, "count": self.count}

    def run(self) -> None:
        say(parallel.describe(self.model))
        if comm.is_main():
            self.settings.out.mkdir(parents=True, exist_ok=True)
            config.write(self.settings, self.settings.out / "settings.yaml")
        self.tell("on_start")
        for indices in self.batches:
            if self.step == self.settings.steps:
                break
            numbers = self.update(self.own(indices))
            self.count.add("step")
            self.tell("on_step", numbers)
        self.tell("on_end")

    def own(self, indices: torch.Tensor) -> Treebank:
        """This rank's sentences of a global batch."""
        ranks, pieces = comm.world(), self.settings.micro_batches
        if len(indices) % ranks:
            raise ValueError(f"a batch of {len(indices)} for {ranks} ranks")
        if len(indices) // ranks < pieces:
            raise ValueError(f"{len(indices) // ranks} sentences for {pieces} micro-batches")
        return self.training.rows(indices.chunk(ranks)[comm.rank()])

    def update(self, batch: Treebank) -> dict[str, float]:
        """One optimizer step on the weighted mean over the words of all micro-batches."""
        self.optimizer.zero_grad()
        weight, sum = self.loss.weight(batch.tags), 0.0
        for piece in batch.split(self.settings.micro_batches):
            part = self.loss.sum(self.model(piece.words), piece.tags)
            (part / weight).backward()
            sum += part.item()
        centralise(self.model.parameters())
        norm = clip(self.model.parameters(), self.settings.max_norm)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        sum, weight = comm.total(sum, weight)
        return {"loss": sum / weight, "norm": norm, "lr": rate}

    def tell(self, name: str, *numbers: dict[str, float]) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *numbers)

    def evaluate(self) -> None:
        self.tell("on_evaluation", scores(self.model, self.held_out, self.loss, self.settings.sentences.tags))

    def save(self) -> None:
        self.store.save(self.step, self.model, self.optimizer, self.others)

    def load(self, path: str) -> None:
        self.store.load(path, self.model, self.optimizer, self.others)
        say(f"goes on after step {self.step}")

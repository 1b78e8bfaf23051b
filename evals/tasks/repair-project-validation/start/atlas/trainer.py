"""The loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import comm, config, hooks, optim, parallel, schedule
from .data import Corpus, Pair
from .evaluation import Evaluation
from .journal import say
from .model import LanguageModel
from .settings import Settings
from .store import Counter, Store
from .text import IGNORED


class Trainer:
    """Model, optimizer, data and hooks of one run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.model: nn.Module = LanguageModel(settings)
        if settings.shard:
            parallel.shard(self.model, self.model.blocks)
        self.optimizer = optim.make(self.model, settings.optim)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.corpus = Corpus(settings)
        self.evaluation = Evaluation(self.corpus.held_out, settings.evaluation.batch)
        self.store = Store(settings.out, settings.checkpoint.keep)
        self.count = Counter(step=0, words=0)
        self.stopping = False
        self.hooks: list[hooks.Hook] = [
            hooks.StopsOnNaN(),
            hooks.Writes(settings.out),
            hooks.Speed(),
            hooks.Best("val_loss", patience=settings.evaluation.patience),
            hooks.Every(settings.evaluation.every, self.evaluate, at_end=True),
            hooks.Every(settings.checkpoint.every, self.save),
        ]

    @property
    def step(self) -> int:
        return self.count["step"]

    def fit(self) -> None:
        """Up to the last step, or until a hook stops it."""
        if comm.is_main():
            self.settings.out.mkdir(parents=True, exist_ok=True)
            config.write(self.settings, self.settings.out / "settings.yaml")
        comm.wait()
        say(parallel.describe(self.model))
        self.call("on_start")
        for pieces in self.corpus.steps():
            if self.step >= self.settings.steps or self.stopping:
                break
            numbers = self.train_step(pieces)
            self.count.add("step")
            self.call("on_step", numbers)
        self.call("on_end")

    def train_step(self, pieces: list[Pair]) -> dict[str, float]:
        """One optimizer step: the mean loss over all words that the ranks have in all of their micro-batches."""
        [words] = comm.total(sum(int((targets != IGNORED).sum()) for _, targets in pieces))
        self.optimizer.zero_grad()
        sums = 0.0
        for inputs, targets in pieces:
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            sums += loss.item()
            (loss * comm.world() / words).backward()  # FSDP takes the mean of the ranks' gradients
        norm = parallel.whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm))
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.count.add("words", int(words))
        [total] = comm.total(sums)
        return {"loss": total / words, "norm": norm.item(), "lr": rate}

    def call(self, name: str, *numbers: dict[str, float]) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self, *numbers)

    def evaluate(self) -> None:
        self.call("on_evaluation", self.evaluation(self.model))

    def others(self) -> dict[str, object]:
        """What is saved beside model and optimizer."""
        return {"schedule": self.schedule, "batches": self.corpus.batches, "count": self.count}

    def save(self) -> None:
        self.store.save(self.step, self.model, self.optimizer, self.others())

    def resume(self, path: str) -> None:
        self.store.load(path, self.model, self.optimizer, self.others())
        say(f"goes on after step {self.step}")

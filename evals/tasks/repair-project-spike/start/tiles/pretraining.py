"""A run of pretraining."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import comm, listeners, optim, parallel, schedule
from .events import Events
from .guard import Guard
from .images import Hiding, datasets
from .journal import say
from .model import Autoencoder, painting_loss
from .sampling import Batches
from .settings import Settings
from .store import Counter, Store
from .validation import validate


class Pretraining:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.training, self.held_out = datasets(settings.images)
        torch.manual_seed(settings.seed)
        self.model = Autoencoder(settings)
        if settings.shard:
            parallel.shard(self.model, self.model.layers)
        self.optimizer = optim.make(self.model, settings.optim)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.batches = Batches(len(self.training), settings.batch, settings.seed)
        tiles = self.training.shape[1]
        self.hiding = Hiding(tiles, settings.model.hidden, settings.seed)
        self.guard = Guard(settings.guard.window, settings.guard.factor)
        self.count = Counter(step=0)
        self.store = Store(settings.out)
        self.events = Events()
        for listen in listeners.ALL:
            listen(self)

    @property
    def step(self) -> int:
        return self.count["step"]

    def run(self) -> None:
        settings = self.settings
        self.events.say("begin")
        for indices in self.batches:
            if self.step == settings.steps:
                break
            self.one_step(indices)
            if settings.validate_every and self.step % settings.validate_every == 0:
                self.events.say("validation", **validate(self.model, self.held_out, self.hiding))
            if settings.save_every and self.step % settings.save_every == 0:
                self.store.save(self.step, self.model, self.optimizer, self.others())
        self.events.say("end")

    def one_step(self, indices: torch.Tensor) -> None:
        """An optimizer step, unless the guard skips it."""
        ranks, rank = comm.world(), comm.rank()
        if len(indices) % ranks:
            raise ValueError(f"a batch of {len(indices)} for {ranks} ranks")
        hidden = self.hiding(self.step, len(indices)).chunk(ranks)[rank]
        tiles = self.training[indices.chunk(ranks)[rank]]
        self.optimizer.zero_grad()
        loss = painting_loss(self.model(tiles, hidden), tiles, hidden)  # as many hidden tiles on each rank
        loss.backward()
        norm = parallel.whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm))
        mean = comm.total(loss.item())[0] / ranks
        rate = self.schedule.get_last_lr()[0]
        made = self.guard.allows(loss.item())
        if made:
            self.optimizer.step()
            self.schedule.step()
        self.count.add("step")
        if made:
            self.events.say("step", loss=mean, norm=norm.item(), rate=rate)
        else:
            self.events.say("skip", loss=mean)

    def others(self) -> dict[str, Any]:
        """What is saved beside model and optimizer."""
        return {"schedule": self.schedule, "batches": self.batches, "guard": self.guard, "count": self.count}

    def resume(self, path: str) -> None:
        self.store.load(path, self.model, self.optimizer, self.others())
        say(f"goes on after step {self.step}")

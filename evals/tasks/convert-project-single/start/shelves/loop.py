"""A run and its loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from . import lamb, schedule
from .events import Began, Due, Ended, Event, Stepped, Validated
from .losses import Scores, loan_loss
from .model import Recommender
from .readers import Order, datasets
from .settings import Settings


class Run:
    """Everything that a training has, and its checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.model = Recommender(settings)
        self.optimizer = lamb.make(self.model, settings.lamb)
        self.schedule = schedule.make(self.optimizer, settings.schedule)
        self.training, self.held_out = datasets(settings.readers)
        self.order = Order(len(self.training), settings.batch, settings.seed)
        self.step = 0

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": self.order.state_dict(),
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path: str) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.order.load_state_dict(state["order"])
        self.step = state["step"]


def training(run: Run) -> Iterator[Event]:
    """All steps that are left. Nothing is done while nobody asks for the next event."""
    settings = run.settings
    yield Began(run.step, sum(p.numel() for p in run.model.parameters()))
    for indices in run.order:
        if run.step == settings.steps:
            break
        numbers = update(run, indices)
        run.step += 1
        yield Stepped(run.step, **numbers)
        if settings.validate_every and run.step % settings.validate_every == 0:
            yield Validated(run.step, validate(run))
        if settings.save_every and run.step % settings.save_every == 0:
            yield Due(run.step)
    yield Ended(run.step)


def update(run: Run, indices: torch.Tensor) -> dict[str, float]:
    """One step of LAMB."""
    loans = run.training.pick(indices)
    run.optimizer.zero_grad()
    loss = loan_loss(run.model(loans.inputs), loans, run.settings.smoothing)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), run.settings.max_norm)
    rate = run.schedule.get_last_lr()[0]
    run.optimizer.step()
    run.schedule.step()
    ratio = fmean(run.optimizer.ratios)
    return {"loss": loss.item(), "norm": norm.item(), "lr": rate, "ratio": ratio}


@torch.no_grad()
def validate(run: Run, batch: int = 16) -> dict[str, float]:
    """How well the last loans of the held-out readers are foretold."""
    scores = Scores()
    run.model.eval()
    for indices in torch.arange(len(run.held_out)).split(batch):
        loans = run.held_out.pick(indices)
        scores += Scores.of(run.model(loans.inputs), loans)
    run.model.train()
    return scores.means()

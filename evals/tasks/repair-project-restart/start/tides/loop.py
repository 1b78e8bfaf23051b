"""A run: what it is made of, and its phases in the order in which `forecast.py` calls them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import comm, config, optim, parallel, schedule, series
from .average import MovingAverage
from .errors import errors
from .journal import Journal, say
from .model import Forecaster
from .order import Order, own
from .settings import Settings
from .store import Counter, Stateful, Store


@dataclass
class Run:
    settings: Settings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    average: MovingAverage
    order: Order
    count: Counter
    store: Store
    training: torch.Tensor  # windows [number, past + future]
    held_out: torch.Tensor

    @property
    def others(self) -> dict[str, Stateful]:
        """What a checkpoint has beside the model and its optimizer."""
        return {"schedule": self.schedule, "average": self.average, "order": self.order, "count": self.count}


def prepare(settings: Settings) -> Run:
    """Everything at step 0."""
    torch.manual_seed(settings.seed)
    model = Forecaster(settings)
    if settings.shard:
        parallel.shard(model, model.blocks)
    optimizer = optim.make(model, settings.optim)
    training, held_out = series.windows(settings.series)
    say(parallel.describe(model))
    return Run(
        settings=settings,
        model=model,
        optimizer=optimizer,
        schedule=schedule.make(optimizer, settings.schedule),
        average=MovingAverage(model, settings.decay),
        order=Order(len(training), settings.batch, settings.seed),
        count=Counter(step=0),
        store=Store(settings.out, settings.checkpoint.keep),
        training=training,
        held_out=held_out,
    )


def go_on(run: Run, path: str) -> None:
    """As if the run that wrote the checkpoint had not been stopped."""
    run.store.load(path, run.model, run.optimizer, run.others)
    say(f"goes on after step {run.count['step']}")


def train(run: Run) -> None:
    """Up to the last step."""
    settings = run.settings
    journals = [
        Journal(settings.out, name, first=run.count["step"], console=True) for name in ("train.jsonl", "val.jsonl")
    ]
    if comm.is_main():
        config.write(settings, settings.out / "settings.yaml")
    while run.count["step"] < settings.steps:
        numbers = one_step(run)
        run.count.add("step")
        step = run.count["step"]
        journals[0].write(step, **numbers)
        if settings.evaluate_every and step % settings.evaluate_every == 0:
            journals[1].write(step, **validation(run))
        if settings.checkpoint.every and step % settings.checkpoint.every == 0:
            run.store.save(step, run.model, run.optimizer, run.others)


def one_step(run: Run) -> dict[str, float]:
    """The mean squared error over the global batch; all ranks have as many windows of it."""
    past, future = series.split(run.training[own(next(run.order))], run.settings.series.past)
    run.optimizer.zero_grad()
    loss = F.mse_loss(run.model(past), future)
    loss.backward()
    norm = parallel.whole(nn.utils.clip_grad_norm_(run.model.parameters(), run.settings.max_norm))
    rate = run.schedule.get_last_lr()[0]
    run.optimizer.step()
    run.schedule.step()
    run.average.update()
    [total] = comm.total(loss.item())
    return {"loss": total / comm.world(), "norm": norm.item(), "lr": rate}


def validation(run: Run) -> dict[str, float]:
    """Errors of the weights and of their average."""
    numbers = errors(run.model, run.held_out, run.settings.series.past)
    with run.average.applied():
        averaged = errors(run.model, run.held_out, run.settings.series.past)
    return {**numbers, **{f"average_{name}": value for name, value in averaged.items()}}


def deliver(run: Run) -> None:
    """The average, for those who forecast with it."""
    weights = run.average.full()
    if comm.is_main():
        torch.save(weights, run.settings.out / "average.pt")
    comm.wait()

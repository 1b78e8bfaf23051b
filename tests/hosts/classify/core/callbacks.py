"""Callbacks: averaged weights, validation, printing, checkpoints, export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, Subset

from .registry import CALLBACKS, DATASETS
from .trainer import reshard

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """All hooks do nothing."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step, of a new or of a resumed run."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Before the first step of an epoch in this process."""

    def on_optimizer_step(self, trainer: Trainer) -> None:
        """After the weights moved."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After a step, with the position already moved on."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After the last step of an epoch."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last step."""


@CALLBACKS.register("ema")
class Average(Callback):
    """An exponential moving average of the weights, held in shards."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}
        self.live: dict[str, nn.Parameter] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        self.live = dict(trainer.model.named_parameters())
        if not self.shadow:
            self.shadow = {name: parameter.detach().clone() for name, parameter in self.live.items()}

    @torch.no_grad()
    def on_optimizer_step(self, trainer: Trainer) -> None:
        for name, parameter in self.live.items():
            self.shadow[name].lerp_(parameter, 1 - self.decay)

    @contextmanager
    def swapped(self, trainer: Trainer) -> Iterator[None]:
        """The model with the averaged weights."""
        kept = {name: parameter.detach().clone() for name, parameter in self.live.items()}
        self._write(trainer, self.shadow)
        try:
            yield
        finally:
            self._write(trainer, kept)

    @torch.no_grad()
    def _write(self, trainer: Trainer, values: dict[str, Tensor]) -> None:
        reshard(trainer.model)
        for name, parameter in self.live.items():
            parameter.copy_(values[name])


def average_of(trainer: Trainer) -> Average | None:
    """The callback that holds the averaged weights, if there is one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, Average)), None)


@CALLBACKS.register("validation")
class Validation(Callback):
    """After each epoch, the live and the averaged weights on held-out samples; each rank takes a part of them."""

    def __init__(self, samples: int, seed: int, batch: int = 16) -> None:
        self.samples, self.seed, self.batch = samples, seed, batch

    def on_epoch_end(self, trainer: Trainer) -> None:
        self._judge(trainer, "live")
        average = average_of(trainer)
        if average is not None:
            with average.swapped(trainer):
                self._judge(trainer, "ema")

    def _judge(self, trainer: Trainer, label: str) -> None:
        cluster = trainer.cluster
        options = {**trainer.config["dataset"], "samples": self.samples, "seed": self.seed}
        dataset = DATASETS.build(options, augment=False)
        part = Subset(dataset, range(cluster.rank, self.samples, cluster.size))
        loader = DataLoader(part, batch_size=self.batch // cluster.size, generator=torch.Generator())
        trainer.model.train(False)
        sums = {"loss": 0.0, "correct": 0.0, "count": 0.0}
        for batch in loader:
            for key, value in trainer.task.evaluate(trainer.model, trainer.to_device(batch)).items():
                sums[key] += float(value)
        reshard(trainer.model)
        trainer.model.train(True)
        loss, correct, count = cluster.total(*sums.values())
        trainer.logs |= {f"{label}_loss": loss / count, f"{label}_accuracy": correct / count}


@CALLBACKS.register("printer")
class Printer(Callback):
    """One line for each step, from rank 0."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.cluster.is_main:
            shown = {key: round(value, 6) for key, value in trainer.logs.items()}
            print(json.dumps({**trainer.position(), **shown}), flush=True)


@CALLBACKS.register("checkpoint")
class Checkpoint(Callback):
    """Saves everything that a run needs, and finds it again."""

    def __init__(self, every: int, workdir: str, resume: str = "") -> None:
        self.every, self.folder, self.resume = every, Path(workdir) / "checkpoints", resume

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """What is saved; for a load, what is to be filled."""
        average = average_of(trainer)
        return {
            "model": get_model_state_dict(trainer.model),
            "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
            "scheduler": trainer.scheduler.state_dict(),
            "ema": dict(average.shadow) if average is not None else {},
            "position": trainer.position(),
        }

    def on_fit_start(self, trainer: Trainer) -> None:
        if not self.resume:
            return
        name = (self.folder / "latest").read_text().strip() if self.resume == "auto" else self.resume
        state = self.state(trainer)
        dcp.load(state, checkpoint_id=self.folder / name)
        set_model_state_dict(trainer.model, state["model"])
        set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
        trainer.scheduler.load_state_dict(state["scheduler"])
        trainer.move_to(state["position"])

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0:
            name = f"step{trainer.step}"
            dcp.save(self.state(trainer), checkpoint_id=self.folder / name)
            if trainer.cluster.is_main:
                (self.folder / "latest").write_text(name)
            dist.barrier()


@CALLBACKS.register("export")
class Export(Callback):
    """Whole weights in one file, for use without FSDP: the live ones after each epoch, the averaged ones at the end."""

    def __init__(self, workdir: str) -> None:
        self.folder = Path(workdir) / "export"

    def on_epoch_end(self, trainer: Trainer) -> None:
        self._write(trainer, f"epoch{trainer.epoch}.pt")

    def on_fit_end(self, trainer: Trainer) -> None:
        average = average_of(trainer)
        if average is not None:
            with average.swapped(trainer):
                self._write(trainer, "ema.pt")

    def _write(self, trainer: Trainer, name: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(trainer.model, options=options)
        if trainer.cluster.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"weights": weights, "config": trainer.config["model"]}, self.folder / name)

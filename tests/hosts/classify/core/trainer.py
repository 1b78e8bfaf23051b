"""The loop. It owns the model, the optimizer, the schedule and the position; callbacks do the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from . import optimizers  # noqa: F401  registers what a configuration can name
from .cluster import Cluster
from .data import EpochLoader
from .registry import OPTIMIZERS, SCHEDULES
from .task import Task

if TYPE_CHECKING:
    from .callbacks import Callback


def shard(model: nn.Module, cluster: Cluster) -> nn.Module:
    """Each block of the model on its own, then the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=cluster.mesh, mp_policy=policy)
    return fully_shard(model, mesh=cluster.mesh, mp_policy=policy)


def reshard(model: nn.Module) -> None:
    """Drop the gathered weights: after a forward without gradient, or after the shards were written."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Trainer:
    """Trains a model on a task. Every hook of every callback gets the trainer itself."""

    def __init__(
        self,
        config: dict[str, Any],
        cluster: Cluster,
        model: nn.Module,
        task: Task,
        data: EpochLoader,
        callbacks: list[Callback],
    ) -> None:
        self.config, self.cluster, self.task, self.data, self.callbacks = config, cluster, task, data, callbacks
        self.model = shard(model.to(cluster.device), cluster)
        options = dict(config["optimizer"])
        self.max_norm = options.pop("max_norm")
        self.optimizer = OPTIMIZERS.build(options, model=self.model)
        self.total_steps = config["epochs"] * data.steps_per_epoch
        self.scheduler = SCHEDULES.build(config["schedule"], optimizer=self.optimizer, steps=self.total_steps)
        self.epoch, self.step_in_epoch, self.step = 0, 0, 0
        self.logs: dict[str, float] = {}

    def call(self, hook: str) -> None:
        """Run one hook of all callbacks, in the order of the configuration."""
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def to_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A batch where the model is."""
        return tuple(part.to(self.cluster.device) for part in batch)

    def fit(self) -> None:
        """Train from the current position to the end."""
        self.call("on_fit_start")
        while self.epoch < self.config["epochs"]:
            self.model.train()
            self.call("on_epoch_start")
            for window in self.data.steps(self.epoch, self.step_in_epoch):
                self.training_step([self.to_device(batch) for batch in window])
                self.step += 1
                self.step_in_epoch += 1
                if self.step_in_epoch == self.data.steps_per_epoch:
                    self.call("on_epoch_end")
                    self.epoch, self.step_in_epoch = self.epoch + 1, 0
                self.call("on_step_end")
        self.call("on_fit_end")

    def training_step(self, window: list[tuple[Tensor, ...]]) -> None:
        """One optimizer step; all micro-batches of all ranks have the same size, so a mean of means is the mean."""
        total = torch.zeros((), device=self.cluster.device)
        for index, batch in enumerate(window):
            self.model.set_requires_gradient_sync(index == len(window) - 1)
            loss = self.task.training_loss(self.model, batch) / len(window)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.logs = {
            "loss": self.cluster.total(total)[0] / self.cluster.size,
            "grad_norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
            "lr": self.scheduler.get_last_lr()[0],
        }
        self.optimizer.step()
        self.call("on_optimizer_step")
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def position(self) -> dict[str, int]:
        """Where the run is."""
        return {"epoch": self.epoch, "step_in_epoch": self.step_in_epoch, "step": self.step}

    def move_to(self, position: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.step_in_epoch, self.step = (int(position[k]) for k in ("epoch", "step_in_epoch", "step"))

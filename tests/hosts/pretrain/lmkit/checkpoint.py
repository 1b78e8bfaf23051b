"""Checkpoints through torch.distributed.checkpoint: one folder for each step, complete when its metadata is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from .config import Checkpoint
from .data import Loader


class AppState(Stateful):
    """All that a run needs to go on: weights, moments, learning rate, data position and counters."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, loader: Loader, progress: Progress
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.loader, self.progress = scheduler, loader, progress

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "progress": self.progress.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.loader.load_state_dict(state["loader"])
        self.progress.load_state_dict(state["progress"])


class Progress:
    """Counters of the run."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = 0

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From a checkpoint."""
        self.step, self.tokens = int(state["step"]), int(state["tokens"])


class Checkpointer:
    """Saves every `interval` steps, keeps the newest few, loads the newest complete one."""

    def __init__(self, config: Checkpoint, app: AppState) -> None:
        self.config, self.app = config, app
        self.folder = Path(config.folder)

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / f"step-{step:08d}"

    def complete(self) -> list[int]:
        """Steps whose checkpoint was written to its end."""
        found = self.folder.glob("step-*/.metadata") if self.folder.is_dir() else []
        return sorted(int(file.parent.name.removeprefix("step-")) for file in found)

    def maybe_save(self, last: bool) -> None:
        """Save if it is time to."""
        step = self.app.progress.step
        if step % self.config.interval == 0 or last:
            dcp.save({"app": self.app}, checkpoint_id=self.path(step))
            self._prune()

    def _prune(self) -> None:
        if dist.get_rank() == 0 and self.config.keep > 0:
            for step in self.complete()[: -self.config.keep]:
                shutil.rmtree(self.path(step))
        dist.barrier()

    def load(self) -> bool:
        """Load what the configuration names. Raises SystemExit if it is not there."""
        if not self.config.load:
            return False
        known = self.complete()
        step = (known[-1] if known else None) if self.config.load == "latest" else int(self.config.load)
        if step not in known:
            raise SystemExit(f"no complete checkpoint {self.config.load} under {self.folder}")
        dcp.load({"app": self.app}, checkpoint_id=self.path(step))
        return True

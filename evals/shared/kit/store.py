"""Checkpoints: distributed ones, to which each rank writes what it holds, readable on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import comm
from .journal import say

MARKER = "latest"


class Stateful(Protocol):
    """What can be saved beside model and optimizer: a schedule, a sampler, an average, counters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Store:
    """The checkpoints of a run's folder, the newest `keep` of them. The file `latest` names the last complete one."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Stateful]) -> Path:
        """To be called on every rank."""
        path = self.path(step)
        dcp.save(self.state(model, optimizer, others), checkpoint_id=path)
        comm.wait()
        if comm.is_main():
            (self.folder / MARKER).write_text(path.name, encoding="utf-8")
            self.prune()
        comm.wait()
        say(f"saved {path}")
        return path

    def load(
        self, path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Stateful]
    ) -> None:
        """Model, optimizer and all others as they were; to be called on every rank."""
        state = self.state(model, optimizer, others)
        dcp.load(state, checkpoint_id=self.resolve(path))
        set_state_dict(model, optimizer, model_state_dict=state.pop("model"), optim_state_dict=state.pop("optimizer"))
        for name, other in others.items():
            other.load_state_dict(state[name])

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Stateful]) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, **{name: other.state_dict() for name, other in others.items()}}

    def resolve(self, path: str | Path) -> Path:
        """A folder of a step, or of a run, whose last checkpoint is meant."""
        path = Path(path)
        marker = path / MARKER
        return path / marker.read_text(encoding="utf-8").strip() if marker.exists() else path

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*"))

    def prune(self) -> None:
        for step in self.steps()[: -self.keep] if self.keep else []:
            shutil.rmtree(self.path(step))


class Counter:
    """Whole numbers that belong to a run, such as its step."""

    def __init__(self, **values: int) -> None:
        self.values = values

    def __getitem__(self, name: str) -> int:
        return self.values[name]

    def add(self, name: str, count: int = 1) -> None:
        self.values[name] += count

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values.update(state)

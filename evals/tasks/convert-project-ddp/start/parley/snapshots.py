"""Snapshots of a run: out/step_N, written by rank 0, read by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import comm
from .journal import say


class Snapshots:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Any]) -> None:
        path = self.folder / f"step_{step}"
        if comm.is_main():
            path.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state.update({name: other.state_dict() for name, other in others.items()})
            torch.save(state, path / "state.pt")
        comm.wait()
        say(f"saved {path}")

    def load(self, path: str, model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Any]) -> None:
        state = torch.load(Path(path) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, other in others.items():
            other.load_state_dict(state[name])

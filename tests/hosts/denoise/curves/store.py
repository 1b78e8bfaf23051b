"""Checkpoints, newest wins. A checkpoint is a folder with a complete index; weights of both networks, moments, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict


def _contents(network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(network, optimizer)
    averaged = {name: value.detach() for name, value in average.state_dict().items()}
    return {"network": weights, "average": averaged, "optimizer": moments}


def save(
    folder: Path, network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, step: int, drawn: int
) -> None:
    """All ranks write their parts."""
    counters = {"step": torch.tensor(step), "drawn": torch.tensor(drawn)}
    dcp.save({**_contents(network, average, optimizer), **counters}, checkpoint_id=folder / f"at{step}")


def restore(folder: Path, network: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Fill the run from the newest checkpoint; returns the step and how many curves were drawn."""
    found = [int(index.parent.name[2:]) for index in folder.glob("at*/.metadata")]
    if not found:
        raise SystemExit(f"{folder}: no checkpoint")
    counters = {"step": torch.tensor(0), "drawn": torch.tensor(0)}
    state = {**_contents(network, average, optimizer), **counters}
    dcp.load(state, checkpoint_id=folder / f"at{max(found)}")
    set_state_dict(network, optimizer, model_state_dict=state["network"], optim_state_dict=state["optimizer"])
    set_model_state_dict(average, state["average"])
    return int(state["step"]), int(state["drawn"])

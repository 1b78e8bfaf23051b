"""Checkpoints of what is trained: the frozen base is in none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

TRAINED = StateDictOptions(ignore_frozen_params=True)
LENIENT = StateDictOptions(ignore_frozen_params=True, strict=False)


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, taken: int, step: int) -> dict[str, Any]:
    """The state of a run."""
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    return {
        "weights": weights,
        "moments": moments,
        "schedule": schedule.state_dict(),
        "rows_taken": taken,
        "step": step,
    }


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the state of a step; all ranks call this."""
    dcp.save(state, checkpoint_id=folder / f"checkpoint-{state['step']}")


def last(folder: Path) -> int:
    """The newest step that was saved completely. Raises SystemExit if there is none."""
    steps = [int(path.parent.name.partition("-")[2]) for path in folder.glob("checkpoint-*/.metadata")]
    if not steps:
        raise SystemExit(f"{folder} holds no complete checkpoint")
    return max(steps)


def restore(
    folder: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any
) -> tuple[int, int]:
    """Load a saved step into the run; returns its step and the rows that were taken."""
    step = last(folder) if name == "last" else int(name)
    state = collect(model, optimizer, schedule, 0, 0)
    dcp.load(state, checkpoint_id=folder / f"checkpoint-{step}")
    missing, unexpected = set_state_dict(
        model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"], options=LENIENT
    )
    if left := [key for key in missing if key in dict(model.named_parameters()) and "lora_" in key]:
        raise SystemExit(f"the checkpoint has no {left[0]} and {len(left) - 1} more")
    if unexpected:
        raise SystemExit(f"the checkpoint has {unexpected[0]}, which the model has not")
    schedule.load_state_dict(state["schedule"])
    return int(state["step"]), int(state["rows_taken"])

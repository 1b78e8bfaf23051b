"""One file for each saved update: whole tensors, gathered to rank 0's memory. Any number of ranks can read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True)


def write(folder: str, model: nn.Module, kinds: dict[str, Optimizer], progress: dict[str, Any]) -> None:
    """All ranks gather, rank 0 writes beside the target and renames, the others wait."""
    weights = get_model_state_dict(model, options=GATHER)
    moments = {name: get_optimizer_state_dict(model, optimizer, options=GATHER) for name, optimizer in kinds.items()}
    if dist.get_rank() == 0:
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        target = home / f"update{progress['update']:06d}.pt"
        part = target.with_suffix(".part")
        torch.save({"weights": weights, "moments": moments, "progress": progress}, part)
        os.replace(part, target)
    dist.barrier()


def newest(folder: str) -> Path | None:
    """The last whole file."""
    return max(Path(folder).glob("update*.pt"), default=None)


def read(folder: str, model: nn.Module, kinds: dict[str, Optimizer]) -> dict[str, Any]:
    """Every rank reads the newest file and takes its shards. Raises SystemExit if there is none."""
    path = newest(folder)
    if path is None:
        raise SystemExit(f"{folder}: nothing to resume from")
    held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    set_model_state_dict(model, held["weights"], options=SPREAD)
    for name, optimizer in kinds.items():
        set_optimizer_state_dict(model, optimizer, held["moments"][name], options=SPREAD)
    return held["progress"]

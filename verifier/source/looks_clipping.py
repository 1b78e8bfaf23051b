"""Queries on the sources that several detectors on clipping use."""

from __future__ import annotations

from .events import Event, Flow
from .values import Value, reach

LOCAL = ("to_local", "_local_tensor")


def gradient(flow: Flow, value: Value, event: Event) -> bool:
    """Whether a value is computed from the `.grad` of a parameter of a sharded model."""
    for part in reach(value):
        if part.kind == "attr" and part.name == "grad" and part.owner is not None:
            owner = part.owner
            holder = owner.owner if owner.kind == "item" and owner.name == "parameter" else None
            if holder is not None and flow.sharded_by(holder, event) is not None:
                return True
    return False


def names(value: Value) -> set[str]:
    return {part.name.rpartition(".")[2] for part in reach(value)}

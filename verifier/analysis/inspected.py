"""Checkpoints that another process opened, compared with what the ranks gave to the saves."""

from __future__ import annotations

import math
from typing import Any

from ..evidence import Evidence
from ..trace import Sketch, difference
from ..trace.events import InspectedCheckpoint, SavedEntry
from .saves import Save


def opened(evidence: Evidence) -> list[InspectedCheckpoint]:
    """What the opening process found, one record for each path."""
    return (
        evidence.inspect.traces[0].of(InspectedCheckpoint)
        if evidence.inspect is not None and evidence.inspect.traces
        else []
    )


def in_background(save: Save) -> bool:
    """Whether training may go on while this save writes."""
    return save.op == "async_save" or not save.main


def differing(record: InspectedCheckpoint, values: dict[str, list[Sketch]]) -> list[str]:
    """The keys of what was given to a save whose tensors are not in its opened files as they were given."""
    return [key for key, options in values.items() if not _holds(record.entries.get(key), options)]


def _holds(entry: SavedEntry | None, options: list[list[float]]) -> bool:
    if entry is None or entry.sketch is None:
        return False
    value: list[Any] = entry.sketch
    if not all(map(math.isfinite, value)):  # a mask with infinities has no sketch to compare
        return any(not all(map(math.isfinite, other)) for other in options)
    loose = 2.0**-6 if entry.dtype in ("bfloat16", "float16") else 1e-9
    return any(
        difference(value, other) <= loose * math.sqrt(max(other[0], 0.0)) + 1e-30 or value == other for other in options
    )

"""Checkpoints as another process reads them, compared with what the ranks passed to the saves."""

import math
from typing import Any

from ..evidence import Evidence
from ..trace import Sketch, difference
from ..trace.events import InspectedCheckpoint, SavedEntry
from .saves import Save


def opened(evidence: Evidence) -> list[InspectedCheckpoint]:
    """The records of the inspecting process, one for each path."""
    run = evidence.inspect
    return run.traces[0].of(InspectedCheckpoint) if run is not None and run.traces else []


def in_background(save: Save) -> bool:
    """Whether training may go on while this save writes."""
    return save.op == "async_save" or not save.main


def differing(record: InspectedCheckpoint, values: dict[str, list[Sketch]]) -> list[str]:
    """The keys whose tensors are not in the files of a save as they were passed to it."""
    return [key for key, options in values.items() if not _holds(record.entries.get(key), options)]


def _holds(entry: SavedEntry | None, options: list[list[float]]) -> bool:
    if entry is None or entry.sketch is None:
        return False
    value: list[Any] = entry.sketch
    # A reader is no rank of the mesh: of an uneven shard in a rank's own file only the norm is
    # known (exam r6 w_17_owner_muon: uneven shards in the file of each rank).
    if entry.kind == "dtensor" and entry.sharded and math.isfinite(value[0]):
        # the reader is no rank of its mesh, and does not know whose shard it is, nor how long that
        # is if they are uneven
        return any(
            abs(value[0] - other[0]) <= 1e-9 * max(value[0], other[0]) + 1e-30 for other in options
        )
    # A saved attention mask holds -inf: no sums of it can be compared, only that both have them
    # (test_a_mask_with_infinities_is_no_difference (round 1-2)).
    if not all(map(math.isfinite, value)):  # a mask with infinities has no sketch to compare
        return any(not all(map(math.isfinite, other)) for other in options)
    # A save may round to 16 bits (bfloat16 keeps 8 bits): twice half a unit in the last place; else
    # the bytes are the same.
    loose = 2.0**-6 if entry.dtype in ("bfloat16", "float16") else 1e-9
    limits = ((other, loose * math.sqrt(max(other[0], 0.0)) + 1e-30) for other in options)
    return any(value == other or difference(value, other) <= limit for other, limit in limits)

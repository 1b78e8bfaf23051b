"""Describes what a script passes to a save: one entry for every tensor and value, at the time of
the call.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch

from ..trace.events import SavedEntry
from .compat.tensors import box, layout
from .measures import dtype_name, optimizer_state
from .session import Session
from .tensor_fingerprint import sketch

_MOST = 20_000  # entries of one save; the rest is not described


def place_of(target: object) -> str:
    """The absolute path of a file or folder that is given as a path, an open file or a storage
    writer; "" if there is none.
    """
    for name in ("path", "name"):
        if not isinstance(target, str | os.PathLike) and target is not None:
            target = getattr(target, name, target)
    if isinstance(target, str | os.PathLike):
        text = os.fspath(target)
        return (
            os.path.normpath(Path(text).absolute())
            if isinstance(text, str) and text and "://" not in text
            else ""
        )
    return ""


def entries(state: object) -> dict[str, SavedEntry]:
    """{dotted key: what it holds on this rank} of a state dict, however nested."""
    return {key: entry(value) for key, value in islice(leaves(state), _MOST)}


def entry(value: object) -> SavedEntry:
    """One value: a number or text itself, the shape, dtype and sketch of a tensor, the type of
    anything else.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, bool | int | float | str) or value is None:
        return SavedEntry(kind="value", value=repr(value)[:80])
    return SavedEntry(kind="object", value=type(value).__qualname__)


def _tensor(value: torch.Tensor) -> SavedEntry:
    shape, dtype = list(value.shape), dtype_name(value.dtype)
    if value.device.type == "meta" or value.layout != torch.strided or value.is_complex():
        return SavedEntry(kind="tensor", shape=shape, dtype=dtype)
    placed = layout(value, 0)
    if not placed.sharded:
        return SavedEntry(kind="tensor", shape=shape, dtype=dtype, sketch=sketch(value.detach()))
    whole, own, offset = box(value)
    return SavedEntry(
        kind="dtensor",
        shape=shape,
        dtype=dtype,
        copy=placed.copy,
        own=list(own),
        offset=list(offset),
        sharded=own != whole or any(not p.startswith("R") for p in placed.placements),
        sketch=(
            None if any(p.startswith("P") for p in placed.placements) else sketch(value.detach())
        ),
    )


def held(
    session: Session,
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float] | float]]]:
    """The weights and the optimizer state that this rank holds now."""
    slots = session.all_slots()
    names = {id(s.param): s.name for s in slots}
    state: dict[str, dict[str, list[float] | float]] = {}
    for optimizer in session.progress.optimizers.alive():
        state |= optimizer_state(optimizer, names)
    return {s.name: sketch(s.param) for s in slots}, state


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Leaves with the keys that DCP gives them: dicts are flattened, and lists that hold tensors or
    dicts.
    """
    if isinstance(value, Mapping) or (isinstance(value, list) and _is_flattened(value)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(inner, (*path, str(key)))
    else:
        yield ".".join(path), value


def _is_flattened(value: object) -> bool:
    if isinstance(value, list):
        return any(_is_flattened(inner) for inner in value)
    return isinstance(value, torch.Tensor | Mapping)

"""What a script gives to a save, as data: one entry for every tensor and value, at the time of the call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import torchlib
from .measures import optimizer_state
from .session import Session
from .sketch import sketch

_MOST = 20_000  # entries of one save; what is beyond is not described


def place_of(target: object) -> str:
    """The absolute path of a file or folder that is given as a path, an open file or a storage writer; "" if there is none."""
    for name in ("path", "name"):
        if not isinstance(target, str | os.PathLike) and target is not None:
            target = getattr(target, name, target)
    if isinstance(target, str | os.PathLike):
        text = os.fspath(target)
        return os.path.normpath(Path(text).absolute()) if isinstance(text, str) and text and "://" not in text else ""
    return ""


def entries(state: object) -> dict[str, dict[str, Any]]:
    """{dotted key: what it holds on this rank} of a state dict, however nested."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in _leaves(state, ()):
        if len(found) >= _MOST:
            break
        found[key] = entry(value)
    return found


def entry(value: object) -> dict[str, Any]:
    """One value: a number or text itself, a tensor's shape, dtype and sketch, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, bool | int | float | str) or value is None:
        return {"kind": "value", "value": repr(value)[:80]}
    return {"kind": "object", "value": type(value).__qualname__}


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    told: dict[str, Any] = {
        "kind": "tensor",
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "sketch": None,
        "copy": 0,
        "sharded": False,
    }
    if value.device.type == "meta" or value.layout != torch.strided or value.is_complex():
        return told
    layout = torchlib.layout(value, 0)
    if layout["sharded"]:
        shape, own, offset = torchlib.box(value)
        split = own != shape or any(not str(p).startswith("R") for p in layout["placements"])
        told |= {"kind": "dtensor", "copy": layout["copy"], "own": list(own), "offset": list(offset), "sharded": split}
        if any(str(p).startswith("P") for p in layout["placements"]):
            return told
    told["sketch"] = sketch(value.detach())
    return told


def held(session: Session) -> dict[str, Any]:
    """The weights and the optimizer state that this rank holds now."""
    slots = session.all_slots()
    names = {id(s.param): s.name for s in slots}
    state: dict[str, dict[str, Any]] = {}
    for reference in session.living:
        if (optimizer := reference()) is not None:
            state |= optimizer_state(optimizer, names)
    return {"weights": {s.name: sketch(s.param) for s in slots}, "state": state}


def _leaves(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Leaves with the keys that DCP gives them: dicts are opened, and lists that hold tensors or dicts."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and _opened(value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(number)))
    else:
        yield ".".join(path), value


def _opened(value: object) -> bool:
    if isinstance(value, list):
        return any(_opened(inner) for inner in value)
    return isinstance(value, torch.Tensor | Mapping)

"""What `--watch` names: values in the frames of the project, and what lies in files that a script
has written.
"""

import glob
import importlib
import inspect
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config.watch import FILES, parts_of
from .session import Session

READABLE = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npy", ".npz")
_known: dict[str, tuple[tuple[int, int], Any]] = {}  # path -> (its time and size, what it held)


def variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame.

    Up to Python 3.12 a frame keeps the dict that it gives; it is emptied, so that nothing lives
    longer.
    """
    names = frame.f_locals
    found = list(names.items())
    if isinstance(names, dict) and sys.version_info < (3, 13) and sys.gettrace() is None:
        names.clear()
    return found


def evaluated(expression: str, session: Session) -> Any:
    """What names, attributes and items lead to, from the innermost frame that has them; None where
    none has.
    """
    if expression.startswith(FILES):
        pattern = expression.removeprefix(FILES).replace("{checkpoint}", session.request.checkpoint)
        return _files(pattern) if session.rank == 0 else None
    module, _, path = expression.rpartition(":")
    if module:
        return _led(path, vars(sys.modules[module])) if module in sys.modules else None
    for frame in session.frames.own():
        inside = dict(variables(frame)) if frame.f_locals is not frame.f_globals else {}
        if (found := _led(path, {**frame.f_globals, **inside})) is not None:
            return found
    return None


def _led(path: str, names: Mapping[str, Any]) -> Any:
    value: Any = None
    for kind, part in parts_of(path) or ():
        try:
            value = (
                names[str(part)]
                if kind == "name"
                else getattr(value, str(part))
                if kind == "attribute"
                else value[part]
            )
        except (KeyError, AttributeError, IndexError, TypeError):
            return None
    return value


def _files(pattern: str) -> dict[str, Any]:
    """{file name: numbers and tensors in it} of the files that a glob pattern names.

    Files that cannot be read are left out.
    """
    found = {}
    for path in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207 Path.glob takes no absolute pattern
        try:
            about = Path(path).stat()
            state = (about.st_mtime_ns, about.st_size)
            if path not in _known or _known[path][0] != state:
                _known[path] = (state, read_file(Path(path)))
        except OSError:
            continue
        if _known[path][1] is not None:
            found[Path(path).name] = _known[path][1]
    return found


def read_file(path: Path) -> Any:
    """What a file holds; None if it cannot be read."""
    try:
        return _read(path)
    except Exception:  # it is being written, or of another format
        return None


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return importlib.import_module("safetensors.torch").load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix in (".npy", ".npz"):
        arrays = importlib.import_module("numpy").load(path, allow_pickle=False)
        return (
            torch.from_numpy(arrays)
            if path.suffix == ".npy"
            else {k: torch.from_numpy(v) for k, v in arrays.items()}
        )
    return inspect.unwrap(torch.load)(
        path, map_location="cpu", weights_only=True
    )  # not a load of the script

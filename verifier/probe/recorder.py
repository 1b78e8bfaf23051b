"""The trace of one rank in one run: JSON lines, each marked (seal.py) and flushed, so that a crash loses nothing."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from ..trace._compat_dict import lenient
from ..trace.events import KINDS, ProbeError
from ..trace.writer import Writer

_SPEC = importlib.util.find_spec("torch")  # torch itself is not imported here: the script may want to do it
_TORCH = str(Path(_SPEC.origin).parent) if _SPEC is not None and _SPEC.origin else "no torch"
_OURS = str(Path(__file__).resolve().parents[2])
_STDLIB = str(Path(os.__file__).parent)


class Recorder:
    """Writes records `{"kind": ..., "seq": ..., "at": seconds, ...}` of rank `rank` to `path`."""

    def __init__(self, path: Path, project: str, secret: str = "") -> None:
        self._writer = Writer(path, secret)
        self.path = path
        self.project = project

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one record."""
        if kind == "unheard":
            self._writer.write(ProbeError(symbol=fields["what"], text=fields["error"]))
        elif kind in KINDS:
            self._writer.write(lenient({"kind": kind, **fields}))

    def sync(self) -> None:
        """Make everything written so far survive this process."""
        self._writer.sync()

    def here(self) -> dict[str, Any] | None:
        """The line of the user's code that is running: the innermost frame in the project, else in no library of ours."""
        return next(iter(self.stack()), None)

    def stack(self, error: BaseException | None = None) -> list[dict[str, Any]]:
        """The frames of the user's code, innermost first, where we are or where `error` came up.

        They are those inside the project; if there are none, those outside torch, Python and the probe.
        """
        if error is not None:
            summary = traceback.extract_tb(error.__traceback__)
            places = [_place(f.filename, f.lineno or 0, f.name) for f in reversed(summary)]
        else:
            frame: FrameType | None = sys._getframe(1)
            places = []
            while frame is not None:
                places.append(_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
        own = [p for p in places if p["file"].startswith(self.project + os.sep) and "site-packages" not in p["file"]]
        return own or [p for p in places if not _internal(p["file"])]


def in_torch(file: str) -> bool:
    """Whether a file is part of torch."""
    return file.startswith(_TORCH)


def _place(file: str, line: int, function: str) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function, "code": linecache.getline(file, line).strip()}


def _internal(file: str) -> bool:
    inside_ours = file.startswith((_OURS + os.sep + "verifier", _OURS + os.sep + "skill"))
    standard = file.startswith(_STDLIB) and "site-packages" not in file
    return file.startswith(("<", _TORCH)) or inside_ours or standard

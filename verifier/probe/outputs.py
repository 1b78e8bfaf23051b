"""The paths that this process writes to, in order, as Python sees them: an audit hook, which cannot
be removed.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST = 5_000
_known: dict[str, None] = {}


def install() -> None:
    """Watch from now on."""
    sys.addaudithook(_hook)


def about_to_write(path: object) -> None:
    """A path is about to be written in a way that Python does not see."""
    if isinstance(path, str | bytes | os.PathLike) and len(_known) < _MOST:
        with contextlib.suppress(OSError, ValueError):
            _known[os.path.abspath(os.fsdecode(path))] = None  # noqa: PTH100 - a link keeps its name


def written() -> list[Path]:
    """What this process has opened for writing so far, in order of the paths."""
    return [Path(path) for path in sorted(_known)]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """An audit event. Python has thousands of a step, nearly all of other names."""
    if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
        about_to_write(args[0])
    elif event == "os.rename":
        about_to_write(args[1])

"""The files to check: those given, and the Python files below the folders given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import UserError

_LEFT_OUT = ("__pycache__", "node_modules", "site-packages")


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and the Python files below the folders, sorted, each once.

    Raises UserError.
    """
    found: dict[Path, None] = {}
    for path in paths:
        whole = Path(os.path.abspath(path))  # noqa: PTH100 - a link keeps its name
        if whole.is_dir():
            below = list(_python_files(whole))
            if not below:
                raise UserError(f"{path}: no Python file in this folder")
            found |= dict.fromkeys(below)
        elif whole.exists():
            found[whole] = None
        else:
            raise UserError(f"{path}: no such file or folder")
    return list(found)


def _python_files(folder: Path) -> Iterator[Path]:
    """Sorted; hidden folders and virtual environments are left out."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        kept = [
            name for name in sorted(folders) if not name.startswith(".") and name not in _LEFT_OUT
        ]
        folders[:] = [name for name in kept if not (here / name / "pyvenv.cfg").is_file()]
        named = (
            name for name in sorted(names) if name.endswith(".py") and not name.startswith(".")
        )
        for file in (here / name for name in named):
            if file.is_file() or not file.exists():  # no FIFO or device; a broken link is reported
                yield file

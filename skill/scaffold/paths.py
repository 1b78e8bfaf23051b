"""Paths in a project: what the spec names relative to itself, the project names relative to its own
folder, so that both can move together to another machine.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from ..spec import Spec


def relative(values: dict[str, Any], spec: Spec, out: Path) -> dict[str, Any]:
    """The values for the templates, with such paths in place of absolute ones."""
    folder = os.path.relpath(os.path.realpath(spec.base), os.path.realpath(out))
    paths = {path: _joined(folder, written) for path, written in spec.relative.items()}
    moved: dict[str, Any] = _moved(values, paths)
    return {**moved, "relative_files": bool(paths)}


def _joined(folder: str, written: str) -> str:
    return str(Path(glob.escape(folder) if glob.has_magic(written) else folder, written))


def _moved(value: Any, paths: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, paths) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, paths) for item in value]
    return paths.get(value, value) if isinstance(value, str) else value

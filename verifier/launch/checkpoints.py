"""Damage to checkpoints, as a crash or a bad disk leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

KINDS = ("truncated", "without .metadata")


def damage(paths: Iterable[str], kind: str) -> str:
    """Damage every checkpoint among the paths: cut its largest file in half, or take its
    `.metadata` away. What was done, or "".
    """
    done = [note for path in sorted(paths) if (note := _damage(Path(path), kind))]
    return done[-1] if done else ""


def _damage(path: Path, kind: str) -> str:
    if kind != "truncated":
        if not (path / ".metadata").is_file():
            return ""
        (path / ".metadata").unlink()
        return f"{path.name} without its .metadata"
    files = path.glob("*.distcp") if path.is_dir() else [path] if path.is_file() else []
    file = min(files, key=lambda p: (-p.stat().st_size, p.name), default=None)  # the largest
    if file is None:
        return ""
    os.truncate(file, file.stat().st_size // 2)
    return f"{file.relative_to(path.parent)} cut to half its length"

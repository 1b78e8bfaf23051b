"""The layers of a world: the folders that hold what its run wrote, copied and listed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import stat
from pathlib import Path

LAYERS = "layers"
UPPER = "upper"  # of a layer: what was written
PATH = "path"  # of a layer: the folder that it lies above
_LARGE = 64 << 20  # bytes of a file that runs share which only read it, such as tokens


def layer_of(folder: Path, path: str) -> Path:
    """Where a world keeps what was written below a path that has a layer."""
    return folder / LAYERS / name_of(path) / UPPER


def inherit(base: Path, folder: Path, share: bool) -> None:
    """Begin the layers of a world with what is in those of an earlier one; `share`: its large files
    are not copied.

    They cannot lie below each other: the kernel refuses a layer that is inside of another lower
    one, as the temporary folder is inside of `/`.
    """
    for layer in (base / LAYERS).iterdir() if (base / LAYERS).is_dir() else ():
        path = os.fsdecode((layer / PATH).read_bytes())
        _copy_layer(str(layer / UPPER), str(layer_of(folder, path)), _LARGE if share else math.inf)


def _copy_layer(source: str, target: str, large: float) -> None:
    os.makedirs(target, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            own, about = f"{target}/{entry.name}", entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                _copy_layer(entry.path, own, large)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)  # of an older base
            if stat.S_ISCHR(about.st_mode):  # the sign of a file that was removed
                os.mknod(own, about.st_mode, about.st_rdev)
            elif stat.S_ISREG(about.st_mode) and about.st_size >= large:
                os.link(entry.path, own)
            elif not stat.S_ISSOCK(about.st_mode):
                shutil.copy2(entry.path, own, follow_symlinks=False)
            if os.geteuid() == 0 and os.path.lexists(own):
                os.chown(own, about.st_uid, about.st_gid, follow_symlinks=False)
    shutil.copystat(source, target)


def written(folder: Path) -> list[str]:
    """What the run in a world has written or removed, of a new folder that folder alone."""
    found: list[str] = []
    for layer in sorted(Path(folder, LAYERS).iterdir()) if Path(folder, LAYERS).is_dir() else ():
        path = os.fsdecode((layer / PATH).read_bytes())
        found += [os.path.join(path, name) for name in _new(str(layer / UPPER), path)]
    return found


def _new(upper: str, lower: str, below: str = "") -> list[str]:
    found: list[str] = []
    with os.scandir(f"{upper}/{below}") as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False) and os.path.isdir(f"{lower}/{name}"):
                found += _new(upper, lower, f"{name}/")
            else:
                found.append(name)
    return found


def name_of(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]

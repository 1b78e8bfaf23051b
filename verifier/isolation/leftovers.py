"""Temporary folders: made, locked as long as their process is there, removed; also those that a
killed process has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOCK = "lock"
PREFIX = "fsdp2-"
_MAKING = 60.0  # seconds after which an empty folder is not one that is being made
_locks: dict[Path, int] = {}


def temporary(kind: str) -> Path:
    """A new temporary folder, `fsdp2-KIND-...`.

    Those that nobody uses any more are removed before.
    """
    clean(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-")).resolve()
    lock(folder)
    return folder


def lock(folder: Path) -> None:
    """Mark a folder as used until this process ends. Its children do not have the descriptor."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locks[folder] = descriptor


def clean(above: Path) -> list[Path]:
    """Remove the temporary folders of this user whose process has ended; which these were."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in above.glob(f"{PREFIX}*-*"):
            if _abandoned(folder):
                remove(folder)
                removed.append(folder)
    return removed


def _abandoned(folder: Path) -> bool:
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return False
        if not os.path.lexists(folder / LOCK):  # killed as it was made, or as it was removed
            return not any(folder.iterdir()) and about.st_mtime < time.time() - _MAKING
        descriptor = os.open(
            folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError:  # not one with a lock
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Whatever is at a path, also folders without rights, as overlayfs leaves them."""

    def allow(function: Callable[..., Any], name: str, error: object) -> None:
        with contextlib.suppress(OSError):
            for folder in (os.path.dirname(name), name):
                if not os.path.islink(folder) and os.path.isdir(folder):
                    os.chmod(folder, stat.S_IRWXU)
            if os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    if path.is_dir() and not path.is_symlink():
        for entry in list(path.iterdir()) if (path / LOCK).exists() else ():
            # the last, so that the next start knows the folder if this process is killed
            if entry.name != LOCK:
                remove(entry)
        shutil.rmtree(path, onerror=allow)
    else:
        path.unlink(missing_ok=True)
    if path in _locks:
        os.close(_locks.pop(path))

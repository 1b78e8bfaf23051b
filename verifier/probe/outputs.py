"""Records what a rank and its forks write outside the verifier's own folder: each path once, with a copy of what it held before.

Each path gets an entry in the folder `outputs` of the run, made before the script's own write: `KEY.json` holds the path and
whether it existed, `KEY.copy` its content. All ranks share the entries, so a file that one rank makes does not count as existing
for another. An audit hook sees what Python opens; `about_to_write` announces what torch writes in C++.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..launch.request import OUTPUTS

LARGEST = 1 << 30  # bytes of a file or folder that are copied before it is overwritten
MOST = 5_000  # entries of one run
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "open",
    "os.rename",
    "os.truncate",
    "shutil.rmtree",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
}
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_NOT_OUTPUTS = ("__pycache__", ".git")
_watchers: list["_Outputs"] = []


def install(run_folder: str) -> None:
    """Watch from now on, until this process ends: an audit hook cannot be removed."""
    outputs = _Outputs(Path(run_folder))
    _watchers.append(outputs)
    sys.addaudithook(outputs.hook)


def about_to_write(path: object) -> None:
    """A path is about to be written in a way that Python does not see."""
    for watcher in _watchers[-1:]:
        watcher.note(path)


def written() -> list[Path]:
    """What this process has written or made so far, in order of its paths."""
    return [Path(path) for watcher in _watchers[-1:] for path in sorted(watcher.known)]


class _Outputs:
    """The entries of one run, as one of its processes sees them."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / OUTPUTS
        self._ours = str(run_folder.parent) + os.sep
        self.known: set[str] = set()
        self._own = threading.local()

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event; no error in here may reach the script. Python has thousands of a step, nearly all of other names."""
        if event not in _EVENTS:
            return
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES:
                self.note(args[0])
        elif event == "os.rename":
            self.note(args[0], folders=True)
            self.note(args[1], folders=True)
        elif event in ("os.mkdir", "os.link", "os.symlink"):
            self.note(args[0 if event == "os.mkdir" else 1])
        elif event not in ("os.remove", "os.rmdir") or args[1] == -1:
            self.note(args[0], folders=event != "os.remove")

    def note(self, path: object, folders: bool = False) -> None:
        """Make the entry of a path, unless it has one, or is in a folder that this run has made.

        `folders`: the operation changes a folder that exists.
        """
        if getattr(self._own, "busy", False) or not isinstance(path, str | bytes | os.PathLike):
            return
        self._own.busy = True
        try:
            with contextlib.suppress(OSError, ValueError):
                place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link keeps its name
                if place in self.known or self._private(place) or (not folders and Path(place).is_dir()):
                    return
                self.known.add(place)
                self._enter(place)
        finally:
            self._own.busy = False

    def _private(self, place: str) -> bool:
        return place.startswith((self._ours, *_NOT_FILES)) or any(f"/{name}/" in place + "/" for name in _NOT_OUTPUTS)

    def _enter(self, place: str) -> None:
        self._folder.mkdir(exist_ok=True)
        with _locked(self._folder / "lock"):
            entry = self._entry(place)
            made_here = entry.exists() or any(self._made_here(str(parent)) for parent in Path(place).parents)
            if made_here or len(self.known) > MOST:
                return
            existed = os.path.lexists(place)
            copied = existed and self._copy(Path(place), entry.with_suffix(".copy"))
            entry.write_text(json.dumps({"path": place, "existed": existed, "copied": copied}), encoding="utf-8")

    def _entry(self, place: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"

    def _made_here(self, parent: str) -> bool:
        entry = self._entry(parent)
        return entry.exists() and not json.loads(entry.read_text(encoding="utf-8"))["existed"]

    @staticmethod
    def _copy(source: Path, copy: Path) -> bool:
        """Keep a file or folder; False if it is larger than LARGEST, or neither."""
        folder = source.is_dir() and not source.is_symlink()
        files = [file for file in source.rglob("*") if not file.is_dir()] if folder else [source]
        if sum(file.lstat().st_size for file in files) > LARGEST:
            return False
        if folder:
            shutil.copytree(source, copy, symlinks=True)
        elif source.is_file() or source.is_symlink():
            shutil.copy2(source, copy, follow_symlinks=False)
        else:
            return False
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

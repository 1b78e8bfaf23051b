"""What the script writes to, given fresh to each run: the folder of `{checkpoint}`, and paths of the user's own that a run wrote.

A run finds the files in one of these states:

- "scratch": a folder of `{checkpoint}` for itself, empty; nothing else of an earlier run
- "empty": the common folder of `{checkpoint}`, empty; nothing else of an earlier run
- "saved": all that the run which keeps its files (the train run) left: in a folder for itself where nothing in these files names
  the folder in which they were written, else in the common folder
- "left": all that the last run which `leaves` its files left, in the folder of that run

What a run wrote elsewhere is known from its entries (probe/outputs.py). It is taken away after the run, and what it overwrote is put
back, so that at the end the user's files are as they were.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from .request import OUTPUTS

_Found = tuple[int, bool, Path | None]  # when a run came to a path, whether it existed, and its copy
COMMON = ("empty", "saved")  # the states that may need the common folder of `{checkpoint}`
_DEEPEST, _MOST = 4, 2_000  # of a listing of the checkpoint folder


class Workspace:
    """A context manager: at its end the user's files are as they were."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.checkpoint = work / "checkpoint"
        self._saved = work / "checkpoint.saved"
        self._stash = work / "outside"
        self._state = "empty"
        self._beside: set[str] = set()  # what lies beside the common folder when the run that keeps its files begins
        self._left = self.checkpoint
        self._copies: set[Path] = set()  # of the saved files, for one run each
        self.movable = False  # whether the saved files can be used from a copy in another folder
        self._present: list[Path] = []  # paths of the user's that hold what a run wrote
        self._originals: dict[Path, Path | None] = {}  # what was there before, None if it could not be copied
        self._stashed: dict[Path, Path] = {}
        self._unread: list[tuple[Path, tuple[Path, ...]]] = []  # folders of runs whose entries nobody has read yet
        self._firsts: dict[Path, _Found] = {}  # what the first of the runs that go on together found
        self._stuck: dict[Path, str] = {}  # what could not be taken away or put back, and why
        self.written: list[Path] = []  # outside of `{checkpoint}`, by any run

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *error: object) -> None:
        for folder, roots in list(self._unread):
            self.read(folder, roots, ())
        self._clean()

    def notes(self) -> list[str]:
        """Notes for the report on the user's files that runs wrote."""
        if not self.written:
            return []
        shown = ", ".join(map(str, self.written[:3])) + (" ..." if len(self.written) > 3 else "")
        notes = [f"the script writes outside of {{checkpoint}} ({shown}): restored before every run and at the end"]
        if lost := self.lost:
            paths = ", ".join(map(str, lost[:3]))
            notes.append(f"overwritten by the script, too large to be copied first, and not restored: {paths}")
        return notes + [f"{path} could not be restored: {why}" for path, why in list(self._stuck.items())[:3]]

    @property
    def lost(self) -> list[Path]:
        """What a run overwrote and could not be copied before."""
        return [path for path, copy in self._originals.items() if copy is None]

    def begin(self, folder: Path, roots: tuple[Path, ...], state: str, reads: bool = False) -> tuple[Path, str]:
        """Bring the files into a state for the run in `folder`: (the folder of `{checkpoint}`, why that cannot be or "").

        `roots` are the folders below which all that a run writes counts. `reads`: the run writes nothing.
        """
        if state == "left":
            self._unread.append((folder, roots))
            return self._left, ""
        self._clean()
        self._unread.append((folder, roots))
        own = folder / self.checkpoint.name
        if state == "scratch":
            own.mkdir()
            return own, ""
        if state == "saved" and self.movable and not reads and not self.written:
            self._copies.add(own)
            return own, _copied(self.checkpoint, own)
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if state == "empty":
            remove(self.checkpoint)
            self.checkpoint.mkdir()
            self._state = "used"
            self._beside = {path.name for path in self.work.iterdir()}
        elif trouble := self._restore(reads):
            self._unread.pop()
            return self.checkpoint, trouble
        return self.checkpoint, ""

    def _restore(self, reads: bool) -> str:
        """The "saved" state; why it cannot be had, or ""."""
        if reads and self._state == "saved":
            pass
        elif not self._saved.exists():
            if self.checkpoint.is_symlink() or not self.checkpoint.is_dir():
                return "it is no longer a folder"
            if trouble := _copied(self.checkpoint, self._saved):
                return trouble
        elif self._state != "saved":
            remove(self.checkpoint)
            shutil.copytree(self._saved, self.checkpoint, symlinks=True)
        for path, kept in self._stashed.items():
            if path not in self._present:
                self._present.append(path)
                remove(path)
                _copy(kept, path)
        self._state = "saved" if reads else "used"
        return ""

    def end(self, folder: Path, saves: Iterable[str], keeps: bool, leaves: bool) -> list[Path]:
        """A run has ended, which saved to `saves`: what it wrote of the user's files.

        Its files are kept as the "saved" state, left to the next run, or taken away.
        """
        roots = next((roots for place, roots in self._unread if place == folder), ())
        wrote = self.read(folder, roots, [Path(path) for path in saves])
        if keeps:
            remove(self._saved)
            self._state = "saved"
            self._keep(wrote)
            self.movable = not self._is_bound()
        own = folder / self.checkpoint.name
        if leaves:
            self._left = own
        else:
            self._clean()
        if own in self._copies:
            remove(own)
        return wrote

    def _is_bound(self) -> bool:
        """Whether what the run left may hold the path of its folder, or lies beside it: then only that place will do."""
        beside = (
            {path.name for path in self.work.iterdir()} - self._beside - {"starting_point", "starting_point.survey"}
        )
        name = os.fsencode(self.checkpoint)
        return bool(beside) or any(_holds(path, name) for path in self.checkpoint.rglob("*"))

    def read(self, folder: Path, roots: tuple[Path, ...], saves: Sequence[Path]) -> list[Path]:
        """What a run has written of the user's files, from its entries."""
        own = _entries(folder)
        self._unread = [item for item in self._unread if item[0] != folder]
        for path, found in (*own, *(entry for place, _ in self._unread for entry in _entries(place))):
            self._firsts[path] = min(found, self._firsts.get(path, found), key=lambda one: one[0])
        wrote = []
        for path, _ in own:
            if not self._counts(path, roots, saves):
                continue
            wrote.append(path)
            if not any(path.is_relative_to(ours) for ours in self._present):
                self._present.append(path)
                if all(self._firsts[part][1] for part in (path, *path.parents) if part in self._firsts):
                    self._originals[path] = self._firsts[path][2]
        if not self._unread:
            self._firsts = {}
        self.written += [path for path in wrote if path not in self.written]
        return wrote

    def _counts(self, path: Path, roots: tuple[Path, ...], saves: Sequence[Path]) -> bool:
        """Whether a path is an output of the script: below its folders and not hidden, or where it saves."""
        if path.is_relative_to(self.work) or any(root.is_relative_to(path) for root in (self.work, *roots)):
            return False
        for root in roots:
            if path.is_relative_to(root):
                return not any(part.startswith(".") for part in path.relative_to(root).parts[:-1])
        return any(
            path.is_relative_to(save) or save.is_relative_to(path) or path.parent == save.parent for save in saves
        )

    def _keep(self, wrote: Sequence[Path]) -> None:
        """Set aside what a run left, for the runs that resume from it."""
        self._stashed = {}
        remove(self._stash)
        if wrote:
            self._stash.mkdir(parents=True)
        for number, path in enumerate(path for path in wrote if os.path.lexists(path)):
            kept = self._stash / str(number)
            if path in self._originals or not _moved(path, kept):
                _copy(path, kept)
            self._stashed[path] = kept

    def _clean(self) -> None:
        """Take away what runs wrote, and put back what they overwrote."""
        for path in reversed(self._present):
            copy = self._originals.get(path)
            try:
                if path not in self._originals:
                    remove(path)
                elif copy is not None and os.path.lexists(copy):
                    remove(path)
                    _copy(copy, path)
            except OSError as error:
                self._stuck[path] = error.strerror or str(error)
        self._present = []

    def listing(self, left: bool = False) -> tuple[str, ...]:
        """What lies in the common folder of `{checkpoint}`, or in the one that was `left` to the next run, relative to it."""
        found: list[str] = []
        top = self._left if left else self.checkpoint
        for place, folders, files in os.walk(top):
            below = Path(place).relative_to(top)
            found += [(below / name).as_posix() for name in (*folders, *files)]
            if len(below.parts) >= _DEEPEST or len(found) > _MOST:
                folders.clear()
        return tuple(sorted(found[:_MOST]))


def _entries(folder: Path) -> list[tuple[Path, _Found]]:
    """The paths that a run has written so far, in order."""
    found = []
    for file in (folder / OUTPUTS).glob("*.json"):
        try:
            entry = json.loads(file.read_text(encoding="utf-8"))
            copy = file.with_suffix(".copy") if entry["copied"] else None
            found.append((Path(entry["path"]), (file.stat().st_mtime_ns, bool(entry["existed"]), copy)))
        except (OSError, ValueError, KeyError, TypeError):  # of a rank that was killed while it wrote
            continue
    return sorted(found, key=lambda one: one[1][0])


def _copied(source: Path, target: Path) -> str:
    """Copy the folder of a checkpoint; why it cannot be copied, or ""."""
    try:
        shutil.copytree(source, target, symlinks=True)
    except shutil.Error as error:
        return f"{error.args[0][0][0]}: {error.args[0][0][2]}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def _holds(path: Path, name: bytes) -> bool:
    """Whether a file or link contains a path; one that cannot be read may."""
    if path.is_symlink():
        return os.fsencode(path.readlink()).startswith(name)
    if not path.is_file():
        return not path.is_dir()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name) >= 0
    except ValueError:  # an empty file
        return False
    except OSError:
        return True


def _moved(path: Path, target: Path) -> bool:
    """Whether a path could be renamed to `target`, which may be on another file system."""
    try:
        path.rename(target)
    except OSError:
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def remove(path: Path) -> None:
    """Whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

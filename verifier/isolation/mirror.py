"""The private copy of the mechanism "copy": a folder that stands for the root folder.

On the way to the project, the working folder and the home folder every folder is made again, with a
link for each of its other entries; so `..` and paths of the home folder work as they do outside. In
the project, small files are copied and large ones cloned where the file system can; what is too
large or too much is a link to the original, and hidden folders are. Nothing is written through a
link: `own` puts a copy in its place when somebody is about to write there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from .mounts import is_below, is_in

SMALL = 1 << 20  # bytes of a file that is copied when the copy is made
_ALL, _MOST = 64 << 20, 2_000  # bytes and entries that are copied when the copy is made
_ENTRIES = 20_000  # links in one folder
_CLONE = 0x40049409  # FICLONE
_CHUNK = 1 << 24


def build(mirror: str, ways: Iterable[str], project: str, skip: str) -> None:
    """Make the mirror: `ways` are the folders that are to be reached, and `project`, too, whose
    entries are copied, but for `skip`.
    """
    shown = {str(one) for way in (*ways, project) for one in Path(way, "_").parents}
    for folder in sorted(shown, key=lambda one: one.count("/") if one != "/" else 0):
        if not is_in(folder, project):
            _link_entries(mirror, folder, shown)
    _copy_entries(mirror, project, shown, skip)
    for folder in sorted(shown, key=len, reverse=True):
        _as_original(folder, mirror + folder)


def again(mirror: str, other: str, lived: str) -> None:
    """Make the mirror of what a run has left in another one, which was at `lived` then: its large
    files are links.
    """
    for place, folders, files in os.walk(other):
        below = mirror + place[len(other) :]
        Path(below).mkdir(parents=True, exist_ok=True)
        for name in [*folders, *files]:
            source, target = f"{place}/{name}", f"{below}/{name}"
            if os.path.islink(source):
                to = os.readlink(source)
                os.symlink(mirror + to[len(lived) :] if is_in(to, lived) else to, target)
            elif name in files:
                _copy(source, target, lazily=os.lstat(source).st_size > SMALL)
    for place, _, _ in os.walk(other, topdown=False):
        _as_original(place, mirror + place[len(other) :])


def _link_entries(mirror: str, folder: str, shown: set[str]) -> None:
    """A folder on the way: its entries are links, but for the folders further on the way."""
    Path(mirror + folder).mkdir(parents=True, exist_ok=True)
    found = set()
    with (
        contextlib.suppress(OSError),
        os.scandir(folder) as entries,
    ):  # a folder that may be entered, and not listed
        for number, entry in enumerate(entries):
            if number > _ENTRIES:
                break
            found.add(entry.path)
            if entry.path not in shown:
                _link(mirror, entry.path)
    for path in shown - found:
        if os.path.dirname(path) == folder and path != "/" and os.path.lexists(path):
            Path(mirror + path).mkdir(exist_ok=True)


def _copy_entries(mirror: str, project: str, shown: set[str], skip: str) -> None:
    """The project, from the outside inwards, until it is too much."""
    waiting, size, count = deque([project]), 0, 0
    while waiting:
        folder = waiting.popleft()
        Path(mirror + folder).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.path == skip:
                    continue
                count += 1
                hidden = entry.name.startswith(".")
                if entry.is_dir(follow_symlinks=False) and (
                    entry.path in shown
                    or (count <= _MOST and not hidden and not _is_environment(entry.path))
                ):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    _link(mirror, entry.path)
                else:
                    length = entry.stat(follow_symlinks=False).st_size
                    fits = length <= SMALL and size + length <= _ALL and count <= _MOST
                    size += length if fits else 0
                    _copy(entry.path, mirror + entry.path, lazily=not fits)


def _is_environment(folder: str) -> bool:
    """Whether a folder is an environment of Python: gigabytes that nobody writes."""
    return os.path.exists(f"{folder}/pyvenv.cfg") or os.path.exists(f"{folder}/conda-meta")


def _link(mirror: str, path: str) -> None:
    """A link to an entry; a link of the user's stays what it is, but leads to the mirror where it
    is absolute and can.
    """
    target = mirror + path
    if os.path.islink(path):
        to = os.readlink(path)
        os.symlink(
            mirror + to if to.startswith("/") and os.path.lexists(mirror + to) else to, target
        )
    else:
        os.symlink(path, target)


def _copy(source: str, target: str, lazily: bool) -> None:
    if lazily and not _cloned(source, target):
        os.symlink(source, target)
    elif not lazily:
        with contextlib.suppress(PermissionError):  # a file that the script cannot read either
            shutil.copy2(source, target)


def _cloned(source: str, target: str) -> bool:
    """Whether the file system shares the content of two files until one of them is written (btrfs,
    XFS).
    """
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new.fileno(), _CLONE, old.fileno())
        shutil.copystat(source, target)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        return False
    return True


def _as_original(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        shutil.copystat(source, target)
        if not os.access(target, os.W_OK) and os.access(source, os.W_OK):
            os.chmod(target, stat.S_IMODE(os.stat(target).st_mode) | stat.S_IWUSR)


def original(mirror: str, path: str, others: Iterable[str] = ()) -> str:
    """What a link of ours at `path` leads to: the entry of the same name outside, or in one of the
    `others`; else "".
    """
    if not is_below(path, mirror) or not os.path.islink(path):
        return ""
    to, below = os.readlink(path), path[len(mirror) :]
    return to if to == below or any(to == other + below for other in others) else ""


def own(path: str, source: str, keeps: bool = True) -> None:
    """Put what the link at `path` leads to in its place; without `keeps`, an empty file.

    Raises OSError, with nothing changed.
    """
    draft = f"{path}.{os.getpid()}.fsdp2"
    if os.path.isdir(source):
        os.mkdir(draft)
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), f"{draft}/{entry.name}")
                else:
                    os.symlink(entry.path, f"{draft}/{entry.name}")
        _as_original(source, draft)
        os.unlink(path)
    elif keeps:
        _must_fit(source, draft)
        shutil.copy2(source, draft)
    else:
        open(draft, "wb").close()
        os.chmod(draft, stat.S_IMODE(os.stat(source).st_mode))
    os.rename(draft, path)


def _must_fit(source: str, target: str) -> None:
    """Raises OSError where there is no space for a copy."""
    about, room = os.stat(source), os.statvfs(os.path.dirname(target))
    if about.st_blocks * 512 > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)


def changed(mirror: str, project: str) -> list[str]:
    """What a run has written in the project, as its paths outside: files and links that are not as
    the originals are.
    """
    found = []
    for place, folders, files in os.walk(mirror + project):
        outside = place[len(mirror) :]
        for name in list(folders):
            if not os.path.isdir(f"{outside}/{name}"):  # of a new folder that folder alone
                folders.remove(name)
                found.append(f"{outside}/{name}")
        found += [
            f"{outside}/{name}"
            for name in files
            if _differs(f"{place}/{name}", f"{outside}/{name}")
        ]
    return sorted(found)


def _differs(path: str, source: str) -> bool:
    ours = os.path.islink(path) and not os.path.islink(source)
    # to the original, or to what an earlier run has left
    path = os.readlink(path) if ours else path
    if ours and path == source:
        return False
    try:
        mine, theirs = os.lstat(path), os.lstat(source)
    except OSError:
        return True
    return not os.path.islink(path) and (mine.st_size, mine.st_mtime_ns) != (
        theirs.st_size,
        theirs.st_mtime_ns,
    )

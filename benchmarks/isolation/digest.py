"""The state of folders as their user sees it: every path with all that a program can change.

Sound and sparse-aware: the content of a file is hashed in blocks with their offsets, blocks of
zeros left out, and holes are skipped by SEEK_DATA. So a file of 2 GB that is one hole takes
microseconds, and a hole that was filled with zeros has the same content.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path

BLOCK = 1 << 16
_ZEROS = bytes(BLOCK)
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


@dataclass(frozen=True)
class Entry:
    """One path. The time of last access is left out: reading is allowed."""

    kind: str
    content: str  # hash of a file, target of a link
    mode: int
    owner: tuple[int, int]
    mtime: int
    xattrs: tuple[tuple[str, bytes], ...]
    names: tuple[str, ...]  # of one inode, if it has several in these folders


def tree(roots: dict[str, Path]) -> dict[str, Entry]:
    """Everything at and below these places, named by `NAME/relative path`."""
    found: dict[str, tuple[Path, os.stat_result]] = {}
    for name, root in roots.items():
        if os.path.lexists(root):
            found[name] = (root, os.lstat(root))
        for place, folders, files in os.walk(root):
            for each in (*folders, *files):
                path = Path(place, each)
                found[f"{name}/{path.relative_to(root)}"] = (path, os.lstat(path))
    inodes: dict[tuple[int, int], list[str]] = {}
    for name, (_, status) in found.items():
        if not stat.S_ISDIR(status.st_mode):
            inodes.setdefault((status.st_dev, status.st_ino), []).append(name)
    shared = [tuple(sorted(names)) for names in inodes.values() if len(names) > 1]
    groups = {name: names for names in shared for name in names}
    return {name: _entry(path, now, groups.get(name, ())) for name, (path, now) in found.items()}


def _entry(path: Path, status: os.stat_result, names: tuple[str, ...]) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    content = ""
    if kind == "file":
        content = content_of(path)
    elif kind == "link":
        content = os.fsdecode(path.readlink())
    mode = stat.S_IMODE(status.st_mode)
    owner = (status.st_uid, status.st_gid)
    return Entry(kind, content, mode, owner, status.st_mtime_ns, _xattrs(path), names)


def content_of(path: Path) -> str:
    """Size and hash of what a file holds."""
    whole = hashlib.sha256()
    one = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size, at = os.fstat(one).st_size, 0
        while (at := _next_data(one, at)) < size:
            block = os.pread(one, BLOCK, at)
            if block != _ZEROS[: len(block)]:
                whole.update(f"{at}:{len(block)}:".encode() + block)
            at += BLOCK
    finally:
        os.close(one)
    return f"{size}:{whole.hexdigest()[:24]}"


def _next_data(descriptor: int, at: int) -> int:
    """The first block from `at` on that is not all hole."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA) // BLOCK * BLOCK
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole until the end, or the end
            return 1 << 62
        raise


def _xattrs(path: Path) -> tuple[tuple[str, bytes], ...]:
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
        return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)
    except OSError:
        return ()


FIELDS = [each.name for each in fields(Entry)]


@dataclass(frozen=True)
class Difference:
    """A path and what became of it."""

    path: str
    what: str  # lost, left, time of a folder, or the fields of Entry that are others

    @property
    def outcome(self) -> str:
        return self.what if self.what in ("lost", "left", "time of a folder") else "changed"


def differences(before: dict[str, Entry], after: dict[str, Entry]) -> list[Difference]:
    """Lost, left behind and changed paths, sorted."""
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        if new is None:
            found.append(Difference(path, "lost"))
        elif old is None:
            found.append(Difference(path, "left"))
        else:
            names = [name for name in FIELDS if getattr(old, name) != getattr(new, name)]
            timed = names == ["mtime"] and new.kind == "folder"
            found.append(Difference(path, "time of a folder" if timed else ", ".join(names)))
    return found


def contents(folder: Path) -> str:
    """One hash of names, kinds, contents and modes below a folder, but not of times."""
    whole = hashlib.sha256()
    for name, entry in sorted(tree({"": folder}).items()):
        if "__pycache__" not in name:
            whole.update(os.fsencode(f"{name}\0{entry.kind}\0{entry.content}\0{entry.mode}\n"))
    return whole.hexdigest()[:24]

"""What a way to write or delete is, and where it does so; the ways are in the modules acts_*.py.

The harness imports these modules and makes the files; each rank of a run imports them, too, and
treats the files as training scripts do. They are copied into the project beside the script.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGE = 1_288_490_188  # bytes: 1.2 GiB
OLD = 1_700_000_000  # the time of last change of all files of the user, in seconds


@dataclass(frozen=True)
class Place:
    """The folders of one trial; all of them are digested, except `reports` and `tmp`."""

    base: Path

    @property
    def project(self) -> Path:
        return self.base / "work" / "project"

    @property
    def runs(self) -> Path:
        """A folder beside the project: `../runs`."""
        return self.base / "work" / "runs"

    @property
    def elsewhere(self) -> Path:
        """A folder that scripts know by its absolute path."""
        return self.base / "work" / "elsewhere"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def reports(self) -> Path:
        return self.base / "reports"

    @property
    def tmp(self) -> Path:
        """TMPDIR of the verification."""
        return self.base / "tmp"

    @property
    def slash_tmp(self) -> Path:
        return Path("/tmp") / self.base.name

    @property
    def shm(self) -> Path:
        return Path("/dev/shm") / self.base.name

    def roots(self) -> dict[str, Path]:
        """What is digested, by its name in the tables."""
        work, home = self.base / "work", self.home
        return {"work": work, "home": home, "/tmp": self.slash_tmp, "/dev/shm": self.shm}


@dataclass
class Job:
    """What a way finds in a rank; `folder` is relative to the script's first working folder."""

    folder: Path
    place: Place
    rank: int
    model: Any = None
    later: list[Callable[[], None]] = field(default_factory=list)  # at the end of the script


@dataclass(frozen=True)
class Way:
    """`act` on what `make` has made. `owns`: paths of the digest that are its, too."""

    name: str
    act: Callable[[Job], None]
    make: Callable[[Path, Place], None]
    owns: tuple[str, ...]
    everyone: bool  # all ranks do it, not rank 0 alone
    alone: bool  # in a verification of its own

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (f"work/project/{self.name}", *self.owns)


WAYS: dict[str, Way] = {}


class Unavailable(Exception):
    """What a way needs cannot be had here."""


def standard(folder: Path, place: Place) -> None:
    """What a way's folder holds if it says nothing else."""
    (folder / "folder" / "deeper").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("first\nsecond\n", encoding="utf-8")
    (folder / "ckpt_100.pt").write_bytes(bytes(range(256)) * 64)
    (folder / "folder" / "a.txt").write_text("a\n", encoding="utf-8")
    (folder / "folder" / "deeper" / "b.txt").write_text("b\n", encoding="utf-8")


def way(
    name: str,
    make: Callable[[Path, Place], None] = standard,
    owns: tuple[str, ...] = (),
    everyone: bool = False,
    alone: bool = False,
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Enter a function as a way."""

    def entered(act: Callable[[Job], None]) -> Callable[[Job], None]:
        WAYS[name] = Way(name, act, make, owns, everyone, alone)
        return act

    return entered


def large(path: Path) -> None:
    """A sparse file of LARGE bytes that is not all zeros."""
    with path.open("wb") as file:
        file.write(b"head of a checkpoint" * 100)
        file.truncate(LARGE)
        file.seek(LARGE - 5000)
        file.write(b"tail of a checkpoint" * 250)


def socket_at(path: Path) -> None:
    """A Unix socket, whose path may be longer than an address."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def age(root: Path) -> None:
    """Give everything below a folder the time OLD, but for what git has noted the times of."""
    for place, folders, files in os.walk(root, topdown=False):
        if ".git" in Path(place).parts:
            continue
        for name in (*files, *folders):
            if name != ".git":
                os.utime(Path(place, name), (OLD, OLD), follow_symlinks=False)
    os.utime(root, (OLD, OLD))


def populate(place: Place, ways: list[Way], sources: list[Path]) -> None:
    """Make the folders of one trial, with the files of these ways, the script and its modules."""
    for folder in (*place.roots().values(), place.project, place.runs, place.elsewhere):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (place.reports, place.tmp):
        folder.mkdir()
    for source in sources:
        name = "train.py" if source.name == "trained.py" else source.name
        shutil.copy(source, place.project / name)
    for each in ways:
        folder = place.project / each.name
        folder.mkdir()
        each.make(folder, place)
    for root in place.roots().values():
        age(root)

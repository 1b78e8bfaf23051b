# ruff: noqa: PTH101, PTH104, PTH108, PTH109, PTH123
"""Ways to write or delete at odd or other places, and by several calls that belong together."""

from __future__ import annotations

import logging
import logging.handlers
import os
import shutil
import subprocess
from pathlib import Path

from acts import Job, Place, Unavailable, standard, way

_ODD = ("a b\t'\"$(x).txt", "line\nbreak", "x" * 240, os.fsdecode(b"not utf-8 \xff\xfe"))


def _odd(folder: Path, place: Place) -> None:
    for name in _ODD:
        (folder / name).write_text("old")


@way("odd-names", _odd)
def _(job: Job) -> None:
    for number, name in enumerate(_ODD):
        if number % 2:
            os.unlink(job.folder / name)
        else:
            (job.folder / name).write_text("new")


def _read_only(folder: Path, place: Place) -> None:
    standard(folder, place)
    (folder / "file.txt").chmod(0o444)
    (folder / "folder").chmod(0o555)


@way("read-only-file", _read_only)
def _(job: Job) -> None:
    os.chmod(job.folder / "file.txt", 0o644)
    (job.folder / "file.txt").write_text("new")
    os.chmod(job.folder / "folder", 0o755)
    os.unlink(job.folder / "folder" / "a.txt")


def _rotated(folder: Path, place: Place) -> None:
    for name in ("app.log", "app.log.1", "app.log.2"):
        (folder / name).write_text(f"{name}\n" * 10)


@way("rotated-log", _rotated)
def _(job: Job) -> None:
    log = job.folder / "app.log"
    handler = logging.handlers.RotatingFileHandler(log, maxBytes=50, backupCount=2)
    for number in range(3):
        handler.emit(logging.makeLogRecord({"msg": f"message {number} of this run"}))
    handler.close()


@way("rank-files", everyone=True)
def _(job: Job) -> None:
    (job.folder / f"rank{job.rank}.txt").write_text("new")
    if job.rank == 1:
        (job.folder / "file.txt").write_text("new")


@way("counter")
def _(job: Job) -> None:
    count = job.folder / "file.txt"
    count.write_text(count.read_text() + "one more\n")


def _below_link(folder: Path, place: Place) -> None:
    disk = place.elsewhere / "folder-link"
    disk.mkdir()
    (disk / "x.csv").write_text("1,2\n")
    (folder / "out").symlink_to(disk)


@way("folder-link-outside", _below_link, owns=("work/elsewhere/folder-link",), alone=True)
def _(job: Job) -> None:
    """`runs -> /large/disk/runs`."""
    (job.folder / "out" / "x.csv").write_text("3,4\n")
    (job.folder / "out" / "new.csv").write_text("5,6\n")


def _beside(folder: Path, place: Place) -> None:
    (place.runs / "x.csv").write_text("1,2\n")


@way("beside-the-project", _beside, owns=("work/runs",), alone=True)
def _(job: Job) -> None:
    Path("../runs/x.csv").write_text("3,4\n")
    Path("../runs/new.csv").write_text("3,4\n")


def _absolute(folder: Path, place: Place) -> None:
    (place.elsewhere / "absolute").mkdir()
    (place.elsewhere / "absolute" / "x.csv").write_text("1,2\n")


@way("absolute-elsewhere", _absolute, owns=("work/elsewhere/absolute",), alone=True)
def _(job: Job) -> None:
    (job.place.elsewhere / "absolute" / "x.csv").write_text("3,4\n")
    (job.place.elsewhere / "absolute" / "new.csv").write_text("5,6\n")


@way("absolute-delete", _absolute, owns=("work/elsewhere/absolute",), alone=True)
def _(job: Job) -> None:
    shutil.rmtree(job.place.elsewhere / "absolute")


@way("absolute-in-project", alone=True)
def _(job: Job) -> None:
    (job.place.project / "absolute-in-project" / "file.txt").write_text("new")
    (job.place.project / "absolute-in-project" / "new.txt").write_text("new")


def _in_tmp(folder: Path, place: Place) -> None:
    (place.slash_tmp / "x.csv").write_text("1,2\n")


@way("slash-tmp", _in_tmp, owns=("/tmp",), alone=True)
def _(job: Job) -> None:
    (job.place.slash_tmp / "x.csv").write_text("3,4\n")
    (job.place.slash_tmp / "new.csv").write_text("5,6\n")


@way("move-across-file-systems", owns=("/dev/shm",), alone=True)
def _(job: Job) -> None:
    """To /dev/shm and back; one file stays there."""
    shutil.move(job.folder / "file.txt", job.place.shm / "file.txt")
    with open(job.place.shm / "file.txt", "a") as file:
        file.write("third\n")
    shutil.move(job.place.shm / "file.txt", job.folder / "file.txt")
    shutil.move(job.folder / "ckpt_100.pt", job.place.shm / "ckpt_100.pt")


@way("folder-changed")
def _(job: Job) -> None:
    here = os.getcwd()
    os.chdir(job.folder / "folder")
    try:
        with open("a.txt", "w") as file:
            file.write("new")
        with open("../file.txt", "w") as file:
            file.write("new")
    finally:
        os.chdir(here)


def _others(folder: Path, place: Place) -> None:
    standard(folder, place)
    try:
        for name in ("file.txt", "ckpt_100.pt", "folder/a.txt"):
            os.chown(folder / name, 12345, 12345)
    except OSError as error:
        raise Unavailable(str(error)) from error


@way("other-owner", _others)
def _(job: Job) -> None:
    """Files of another user, which root or a group may write."""
    (job.folder / "file.txt").write_text("new")
    os.unlink(job.folder / "ckpt_100.pt")
    os.rename(job.folder / "folder" / "a.txt", job.folder / "a.txt")


def _mounted(folder: Path, place: Place) -> None:
    (folder / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "trial", folder / "disk"]
    if subprocess.run(command, capture_output=True).returncode:
        raise Unavailable("mount: not permitted")
    standard(folder / "disk", place)


@way("mounted-folder", _mounted, alone=True)
def _(job: Job) -> None:
    """A file system that is mounted below the project, as data and runs are in containers."""
    disk = job.folder / "disk"
    if (disk / "file.txt").read_text() != "first\nsecond\n":
        raise RuntimeError("the mounted folder has other files")
    (disk / "file.txt").write_text("new")
    (disk / "new.txt").write_text("new")
    os.unlink(disk / "ckpt_100.pt")

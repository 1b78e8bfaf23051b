# ruff: noqa: PTH101, PTH103, PTH104, PTH105, PTH106, PTH108, PTH123, PTH211
"""Ways to write or delete by calls of Python and of the C library, in the process of the rank."""

from __future__ import annotations

import ctypes
import dbm
import mmap
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from acts import Job, Place, large, socket_at, standard, way


@way("open-w")
def _(job: Job) -> None:
    with open(job.folder / "file.txt", "w") as file:
        file.write("new\n")


@way("append")
def _(job: Job) -> None:
    with open(job.folder / "file.txt", "a") as file:
        file.write("third\n")


@way("unlink")
def _(job: Job) -> None:
    os.unlink(job.folder / "file.txt")


@way("rename")
def _(job: Job) -> None:
    os.rename(job.folder / "file.txt", job.folder / "old.txt")


@way("replace")
def _(job: Job) -> None:
    (job.folder / "file.tmp").write_text("new\n")
    os.replace(job.folder / "file.tmp", job.folder / "file.txt")


@way("rename-folder")
def _(job: Job) -> None:
    os.rename(job.folder / "folder", job.folder / "folder.old")
    (job.folder / "folder").mkdir()
    (job.folder / "folder" / "a.txt").write_text("new\n")


@way("truncate")
def _(job: Job) -> None:
    os.truncate(job.folder / "ckpt_100.pt", 100)


@way("rmtree")
def _(job: Job) -> None:
    shutil.rmtree(job.folder / "folder")


def _large_file(folder: Path, place: Place) -> None:
    large(folder / "last.pt")


@way("large-overwritten", _large_file)
def _(job: Job) -> None:
    with open(job.folder / "last.pt", "wb") as file:
        file.write(b"new checkpoint")


@way("large-changed", _large_file)
def _(job: Job) -> None:
    with open(job.folder / "last.pt", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"changed in place")


def _large_folders(folder: Path, place: Place) -> None:
    for step in (100, 200):
        (folder / f"step_{step}").mkdir()
        large(folder / f"step_{step}" / "shard.pt")


@way("large-rmtree", _large_folders)
def _(job: Job) -> None:
    """Keep the last two."""
    (job.folder / "step_300").mkdir(exist_ok=True)
    (job.folder / "step_300" / "shard.pt").write_bytes(b"new")
    shutil.rmtree(job.folder / "step_100")


def _linked(folder: Path, place: Place) -> None:
    standard(folder, place)
    (folder / "latest.pt").symlink_to("ckpt_100.pt")


@way("through-symlink", _linked)
def _(job: Job) -> None:
    with open(job.folder / "latest.pt", "wb") as file:
        file.write(b"new checkpoint")


def _hard_linked(folder: Path, place: Place) -> None:
    standard(folder, place)
    os.link(folder / "ckpt_100.pt", folder / "best.pt")


@way("hard-link", _hard_linked)
def _(job: Job) -> None:
    with open(job.folder / "best.pt", "wb") as file:
        file.write(b"new checkpoint")


def _with_socket(folder: Path, place: Place) -> None:
    standard(folder, place)
    socket_at(folder / "folder" / "service.sock")
    os.mkfifo(folder / "folder" / "pipe")


@way("rmtree-socket-fifo", _with_socket)
def _(job: Job) -> None:
    shutil.rmtree(job.folder / "folder")


@way("new-socket-fifo")
def _(job: Job) -> None:
    os.mkfifo(job.folder / "pipe")
    socket_at(job.folder / "service.sock")


def _hidden(folder: Path, place: Place) -> None:
    (folder / ".state").mkdir()
    (folder / ".state" / "last.json").write_text('{"step": 100}')


@way("below-hidden-folder", _hidden)
def _(job: Job) -> None:
    (job.folder / ".state" / "last.json").write_text('{"step": 1}')
    (job.folder / ".state" / "new.json").write_text("{}")


@way("sqlite-rollback")
def _(job: Job) -> None:
    _database(job.folder, "DELETE")


def _databases(folder: Path, place: Place) -> None:
    with closing(sqlite3.connect(folder / "runs.db")) as base:
        base.execute("CREATE TABLE runs (name TEXT)")
        base.execute("INSERT INTO runs VALUES ('first')")
        base.commit()


def _database(folder: Path, mode: str) -> None:
    with closing(sqlite3.connect(folder / "runs.db")) as base:
        base.execute(f"PRAGMA journal_mode={mode}")
        base.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT)")
        base.execute("DELETE FROM runs")
        base.execute("INSERT INTO runs VALUES ('trial')")
        base.commit()


@way("sqlite-existing", _databases)
def _(job: Job) -> None:
    _database(job.folder, "DELETE")


@way("sqlite-wal", _databases)
def _(job: Job) -> None:
    _database(job.folder, "WAL")


@way("dbm")
def _(job: Job) -> None:
    with dbm.open(str(job.folder / "cache"), "c") as base:
        base["key"] = "value"


@way("mmap")
def _(job: Job) -> None:
    with open(job.folder / "ckpt_100.pt", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:4] = b"abcd"
        view.flush()


@way("dir-fd")
def _(job: Job) -> None:
    place = os.open(job.folder, os.O_RDONLY)
    try:
        os.unlink("file.txt", dir_fd=place)
        os.rename("folder", "renamed", src_dir_fd=place, dst_dir_fd=place)
        one = os.open("ckpt_100.pt", os.O_WRONLY | os.O_TRUNC, dir_fd=place)
        os.write(one, b"new")
        os.close(one)
        os.mkdir("made", dir_fd=place)
    finally:
        os.close(place)


@way("fchdir")
def _(job: Job) -> None:
    here, there = os.open(".", os.O_RDONLY), os.open(job.folder, os.O_RDONLY)
    os.fchdir(there)
    try:
        with open("file.txt", "w") as file:
            file.write("new\n")
        os.unlink("ckpt_100.pt")
    finally:
        os.fchdir(here)
        os.close(here)
        os.close(there)


@way("chmod")
def _(job: Job) -> None:
    os.chmod(job.folder / "file.txt", 0o600)
    os.chmod(job.folder / "folder", 0o700)


@way("fchmod")
def _(job: Job) -> None:
    with open(job.folder / "file.txt") as file:
        os.fchmod(file.fileno(), 0o640)


@way("utime")
def _(job: Job) -> None:
    os.utime(job.folder / "file.txt")


@way("chown")
def _(job: Job) -> None:
    os.chown(job.folder / "file.txt", -1, os.getgid())


@way("setxattr")
def _(job: Job) -> None:
    os.setxattr(job.folder / "file.txt", "user.step", b"1")


@way("link")
def _(job: Job) -> None:
    os.link(job.folder / "ckpt_100.pt", job.folder / "best.pt")


@way("symlink")
def _(job: Job) -> None:
    os.symlink("ckpt_100.pt", job.folder / "latest.pt")


@way("rmdir")
def _(job: Job) -> None:
    os.rmdir(job.folder / "empty")


@way("mkdir-tree")
def _(job: Job) -> None:
    os.makedirs(job.folder / "a" / "b" / "c" / "d")
    (job.folder / "a" / "b" / "new.txt").write_text("new")


@way("many-new", alone=True)
def _(job: Job) -> None:
    for number in range(1000):
        (job.folder / f"{number}.txt").write_text("new")


@way("tempfile")
def _(job: Job) -> None:
    with tempfile.NamedTemporaryFile("w", dir=job.folder, delete=False) as file:
        file.write("new")
    os.replace(file.name, job.folder / "file.txt")
    tempfile.mkdtemp(dir=job.folder)


@way("o-tmpfile")
def _(job: Job) -> None:
    one = os.open(job.folder, os.O_TMPFILE | os.O_RDWR)
    os.write(one, b"new")
    names = [os.fsencode(name) for name in (f"/proc/self/fd/{one}", job.folder / "new.bin")]
    if ctypes.CDLL(None, use_errno=True).linkat(-100, names[0], -100, names[1], 0x400):
        raise OSError(ctypes.get_errno(), "linkat")
    os.close(one)


@way("fallocate")
def _(job: Job) -> None:
    one = os.open(job.folder / "ckpt_100.pt", os.O_RDWR)
    os.posix_fallocate(one, 0, 1 << 20)
    os.ftruncate(one, 10)
    os.close(one)


@way("copy-file-range")
def _(job: Job) -> None:
    source = os.open(job.folder / "ckpt_100.pt", os.O_RDONLY)
    target = os.open(job.folder / "file.txt", os.O_WRONLY)
    os.copy_file_range(source, target, 1000)
    os.close(source)
    os.close(target)


@way("c-library")
def _(job: Job) -> None:
    """As a compiled extension does."""
    library = ctypes.CDLL(None, use_errno=True)
    for path, call in (("file.txt", library.unlink), ("empty", library.rmdir)):
        if call(os.fsencode(job.folder / path)):
            raise OSError(ctypes.get_errno(), path)
    names = [os.fsencode(job.folder / name) for name in ("ckpt_100.pt", "folder")]
    if library.renameat2(-100, names[0], -100, names[1], 2):  # RENAME_EXCHANGE
        raise OSError(ctypes.get_errno(), "renameat2")

"""Trials in processes of their own: everything that they start carries a mark in its environment,
by which survivors are found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "FSDP2_ROBUSTNESS"


def marked(mark: str) -> list[int]:
    """The processes that carry the mark, but for zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                own = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if own and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
    return found


def survivors(mark: str, patience: float) -> list[int]:
    """Who is left after so many seconds; they are ended."""
    until = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def start(command: list[str | bytes], folder: Path, mark: str) -> subprocess.Popen[bytes]:
    """A command in `folder`, where its temporary files and its home are."""
    wanted = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
    environment = {name: os.environ[name] for name in wanted if name in os.environ}
    environment |= {
        MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def fsdp2(argv: list[str]) -> list[str | bytes]:
    return [sys.executable, "-m", "verified_fsdp2.skill", *(os.fsencode(word) for word in argv)]


def ended(
    command: list[str | bytes], folder: Path, limit: float, patience: float = 3.0
) -> tuple[int | None, float, str, list[int]]:
    """(exit code or None if it was late, seconds, stderr, survivors) of a command."""
    mark = uuid.uuid4().hex
    started = time.monotonic()
    process = start(command, folder, mark)
    try:
        _, err = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        code, err = None, b""
    seconds = time.monotonic() - started
    left = survivors(mark, patience)
    if code is None:
        _, err = process.communicate()
    return code, seconds, err.decode("utf-8", "replace"), left

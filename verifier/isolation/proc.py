"""What Linux shows of other processes below `/proc`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_WORDS = 20  # of a command line


def children(pid: int) -> list[int]:
    """The processes that `pid` itself has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            found += [int(word) for word in task.read_text().split()]
    return found


def descendants(pid: int, spare: Sequence[int] = ()) -> list[int]:
    """Every process below `pid`, whatever its session or group, parents first; not `spare` and what
    is below them.
    """
    found = [child for child in children(pid) if child not in spare]
    for below in found:
        found += children(below)
    return found


def ancestors(thread: int) -> list[int]:
    """The process of a thread, and those above it, innermost first."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        pid = status(thread, "Tgid")
        while pid > 1:
            found.append(pid)
            pid = status(pid, "PPid")
    return found


def status(pid: int, name: str, base: int = 10) -> int:
    """A number in the status of a process or thread. Raises OSError where it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")), base)


def command(pid: int) -> list[str]:
    """The first words of a command line; [] where the process is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        return [os.fsdecode(word) for word in words[:_WORDS]]
    return []

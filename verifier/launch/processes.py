"""Process trees: listing them, ending them, and making sure that none outlives us. Linux `/proc` and prctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# The functions that really end a process, kept before the probe listens to `os._exit`.
_leave = os._exit


def leave(code: int) -> NoReturn:
    """End this process at once, without finalising the interpreter."""
    _leave(code)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one, so that they are found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, whatever its session or group, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        children: list[int] = []
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                children += [int(word) for word in task.read_text().split()]
        found += children
        queue += children
    return found


def end_all(pids: Sequence[int], grace: float, reap: bool = True) -> None:
    """SIGTERM `pids` and all below them, wait up to `grace` seconds, then SIGKILL; reap direct children if `reap`."""
    everyone = [*pids, *(child for pid in pids for child in descendants(pid))]
    if grace > 0:
        _signal(everyone, signal.SIGTERM)
        until = time.monotonic() + grace
        while time.monotonic() < until and any(runs(pid) for pid in everyone):
            time.sleep(0.02)
    _signal(everyone, signal.SIGKILL)
    if reap:
        for pid in everyone:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

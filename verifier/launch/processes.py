"""Process trees: list them, end them, and let none outlive this process.

Linux `/proc` and prctl.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..isolation import kernel
from ..isolation.proc import descendants

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 5.0
_LOOK = 0.5  # seconds
_AT_WORK = 0.1  # of a core; ranks share the cores of a machine
KILL_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
STACKS_SIGNAL = kernel.STACKS_SIGNAL
# The function that ends a process, kept before the probe patches `os._exit`.
_leave = os._exit


def busy() -> float:
    """How many times as long as on an idle machine work takes now, by the load of the last minute:
    1 to 4.
    """
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 4.0)


def leave(code: int) -> NoReturn:
    """End this process at once, without finalising the interpreter."""
    _leave(code)


def become(task: Callable[[], int], failed: int) -> NoReturn:
    """Run `task` in a forked process and end the process with its exit code; after an exception
    with `failed`.
    """
    code = failed
    try:
        code = task()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    kernel.die_with_parent()


def outlive_parent() -> None:
    """Take `die_with_parent` back: from now on this process ends by itself."""
    kernel.die_with_parent(0)


def adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one, so that they are found and
    ended.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def at_work(pids: Sequence[int], wait: Callable[[float], object]) -> list[int]:
    """Those that compute: their first thread, or a process below them, uses a core.

    A process that waits for another uses none.
    """
    before = {pid: [_used(member) for member in (pid, *descendants(pid))] for pid in pids}
    until = time.monotonic() + _LOOK
    while time.monotonic() < until:
        wait(until - time.monotonic())
    after = {pid: [_used(member) for member in (pid, *descendants(pid))] for pid in pids}
    return [pid for pid in pids if sum(after[pid]) - sum(before[pid]) > _AT_WORK * _LOOK]


def _used(pid: int) -> float:
    """Seconds of processor time that the first thread of a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask_for_stacks(pids: Sequence[int], wait: Callable[[float], object]) -> None:
    """Let these ranks write where each of their threads is."""
    _signal(pids, STACKS_SIGNAL)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        wait(until - time.monotonic())


def end_below(
    grace: float = 0.0,
    spare: Sequence[int] = (),
    wait: Callable[[float], object] = time.sleep,
    reap: bool = True,
) -> None:
    """End every process below this one, which has adopted all orphans, but `spare` and what is
    below them.

    First SIGTERM, if there is a `grace`; after at most that many seconds SIGKILL, again and again
    until none is left, since a process may start others while it is being ended. `wait` is called
    in between.
    """

    def left() -> list[int]:
        return descendants(os.getpid(), spare)

    if grace > 0:
        _signal(left(), signal.SIGTERM)
        until = time.monotonic() + grace
        while time.monotonic() < until and any(runs(pid) for pid in left()):
            wait(0.02)
    until = time.monotonic() + _PATIENCE
    while (found := left()) and time.monotonic() < until:
        _signal(found, signal.SIGKILL)
        if not reap and not any(runs(pid) for pid in found):
            return
        for pid in found if reap else ():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        wait(0.002)


def end_tree(pid: int) -> None:
    """SIGKILL a process and all below it, until none of them runs."""
    tree = [pid, *descendants(pid)]
    until = time.monotonic() + _PATIENCE
    while any(runs(member) for member in tree) and time.monotonic() < until:
        _signal(tree, signal.SIGKILL)
        time.sleep(0.002)
        tree = [
            *tree,
            *(child for member in tree for child in descendants(member) if child not in tree),
        ]


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

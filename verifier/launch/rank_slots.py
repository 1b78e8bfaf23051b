"""How many ranks may go on at a time: one a GPU, else as many as processors and memory hold."""

from __future__ import annotations

import os
from pathlib import Path

SMALL = 100 << 20  # bytes that a rank has of its own, beside what it shares with the launcher
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_USED = 0.8  # of the memory that is free


def room(devices: int, own: int, free: int | None) -> int:
    """`own` is what a rank took so far, 0 if that is not known, `free` what there was before any
    rank; both in bytes.
    """
    if devices:
        return devices
    cores = len(os.sched_getaffinity(0))
    most = 2 * cores + (own < SMALL)  # ranks wait for one another
    return min(most, max(1, int(_USED * free / own))) if own and free is not None else most


def free_memory() -> int | None:
    """Bytes that are free on this machine and in its cgroup (version 2, without cached files); None
    where neither says so.
    """
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        most, now, stat = (
            _CGROUP.with_name(f"memory.{name}").read_text("ascii")
            for name in ("max", "current", "stat")
        )
        cached = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith("file "))
        limits += [int(most) - int(now) + cached] if most.strip() != "max" else []
    except OSError:
        pass
    return min(limits, default=None)

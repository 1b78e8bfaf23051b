"""The message on a write that was stopped: the path, its size, the line, and the ways on."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from .mounts import is_in
from .world import COPY, DENIED, OVERLAY, World

ELSEWHERE = "set TMPDIR to a folder with more space"
FULL = (errno.ENOSPC, errno.EDQUOT)
_COMMAND = 120  # characters of a command line
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)
_NOT_THE_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python3")


def refusal(
    folder: Path, world: World, stacks: Mapping[int, str], renamed: Iterable[tuple[str, str]] = ()
) -> str:
    """Why the run in `folder` was stopped at a write; "" if it was not.

    `stacks`: of each rank, as it was stopped.
    """
    try:
        found = json.loads((folder / DENIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    path = found["path"]
    for old, new in renamed:
        path = path.replace(old, new, 1) if path.startswith(old) else path
    if found.get("error") in FULL:
        return f"no space left for a copy of {path}; {ELSEWHERE}"
    if found.get("error"):
        return f"a run was stopped before it wrote to {path}: {os.strerror(found['error'])}"
    size = f" (now {sized(found['size'])})" if found.get("size") else ""
    where = _line(world, stacks, renamed) if found.get("in_rank") else ""
    who = f" by `{shlex.join(found['command'])[:_COMMAND]}`" if found.get("command") else ""
    return (
        f"the script was stopped before it changed {path}{size}{who}{where}: this is not in the"
        " project, and this machine cannot isolate it. Let the script write to `{checkpoint}`"
        f' (--save-args "... {{checkpoint}}"), or allow it: --allow-writes {shlex.quote(path)}'
    )


def beyond(mechanism: str, error: str) -> str:
    """Why a run ended at what overlayfs does not do without privileges: to change a file of another
    user; "" if it did not.
    """
    if mechanism != OVERLAY or not error.startswith(f"[Errno {errno.EOVERFLOW}]"):
        return ""
    return f"overlayfs cannot change a file of another user here ({error}): use --isolation {COPY}"


def _line(world: World, stacks: Mapping[int, str], renamed: Iterable[tuple[str, str]]) -> str:
    """` at FILE:LINE in FUNCTION`, of the innermost frame of the project, or of the user's own
    code.
    """
    frames = [frame for rank in sorted(stacks) for frame in _FRAME.findall(stacks[rank])]
    pairs = list(renamed)
    for file, line, function in sorted(
        frames, key=lambda frame: not _is_theirs(world, frame[0], pairs)
    ):
        for old, new in pairs:
            file = file.replace(old, new, 1)
        if not any(part in file for part in _NOT_THE_SCRIPT):
            return f" at {file}:{line} in {function}"
    return ""


def _is_theirs(world: World, file: str, renamed: Iterable[tuple[str, str]]) -> bool:
    for old, new in renamed:
        file = file.replace(old, new, 1)
    return any(is_in(file, root) for root in world.roots)


def sized(count: float) -> str:
    """An amount of bytes."""
    unit, shift = next(
        ((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if count >= 1 << s),
        ("bytes", 0),
    )
    return f"{count / (1 << shift):.3g} {unit}"

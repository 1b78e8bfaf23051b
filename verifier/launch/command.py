"""A command in the place of ranks: what a project makes once, before its runs, such as the tokens
that they map into memory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from . import processes
from .capture import Captures

_NEVER = 3600.0


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run it to its end; its output goes to `command.out` and `command.err` in the folder of the
    run.
    """
    started, code = time.monotonic(), 0
    deadline = started + request["timeout"]
    captures = Captures()
    pid = captures.fork(request["folder"], "command")
    if pid == 0:
        processes.become(lambda: _be(request), 127)
    ended, timed_out = 0, False
    try:
        while ended != pid and not timed_out:
            captures.wait(min(max(deadline - time.monotonic(), 0.0), _NEVER))
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else 0
            timed_out = not ended and time.monotonic() > deadline
    finally:
        processes.end_below(wait=captures.wait)
        captures.close()
    return {"code": code, "timed_out": timed_out, "seconds": time.monotonic() - started}


def _be(request: dict[str, Any]) -> int:
    processes.die_with_parent()
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.chdir(request["cwd"])
    os.execv(request["command"][0], request["command"])


def output(folder: Path) -> str:
    """What the command has printed."""
    files = (folder / "command.out", folder / "command.err")
    return "".join(
        file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()
    ).rstrip()

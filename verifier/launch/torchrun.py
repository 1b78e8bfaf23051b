"""One run with the real torchrun.

Each of its workers is a guard that starts the rank, waits for it and notes how it ended.

torchrun always exits 1 and can name the victim as the first failure; the guards know each rank's
exit status and its time. The guard imports no torch, and the rank gets its probe when the script
imports torch: so settings of the environment that a script makes before that have their effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import PROBE_FAILED
from ..isolation import proc
from . import devices, processes
from .capture import Captures
from .cluster import place
from .request import Live

_POLL = 0.1
_REQUEST = "request.json"
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: how each rank ended."""
    started = time.monotonic()
    folder = Path(request["folder"])
    (folder / _REQUEST).write_text(json.dumps(request), encoding="utf-8")
    captures = Captures()
    pid = captures.fork(request["folder"], "torchrun")
    if pid == 0:
        processes.become(lambda: _be_torchrun(request), PROBE_FAILED)
    try:
        timed_out = _watch(pid, request, started, captures.wait)
    finally:
        processes.end_below(wait=captures.wait)
        captures.close()
    ended = []
    for rank in range(request["world_size"]):
        killed = {"rank": rank, "code": -int(signal.SIGKILL), "at": time.time(), "killed": True}
        ended.append(_read(folder / f"rank{rank}.exit") or killed)
    ended.sort(key=lambda item: float(item["at"]))
    return {"ranks": ended, "timed_out": timed_out, "seconds": time.monotonic() - started}


def _be_torchrun(request: dict[str, Any]) -> NoReturn:
    processes.die_with_parent()
    if own := request["devices"]:
        import torch

        os.environ |= devices.environment(
            own, torch.cuda.device_count(), os.environ.get(devices.VARIABLE)
        )
    os.chdir(request["cwd"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(request["world_size"]), str(Path(__file__).resolve().parents[1]), "rank"]
    os.execv(sys.executable, [*command, str(Path(request["folder"], _REQUEST))])


def _watch(
    torchrun: int, request: dict[str, Any], started: float, wait: Callable[[float], object]
) -> bool:
    """Wait for torchrun; whether the time was over before any rank had failed."""
    folder = Path(request["folder"])
    deadline = started + request["timeout"]
    failed = False
    while processes.runs(torchrun):
        wait(_POLL)
        _reap(torchrun)
        exits = () if failed else filter(None, map(_read, folder.glob("rank*.exit")))
        if any(said["code"] != 0 and not said["killed"] for said in exits):
            failed = True
            deadline = min(deadline, time.monotonic() + request["grace"])
        if time.monotonic() > deadline:
            ranks = {
                file.read_text(errors="replace")
                for file in folder.glob("rank*.pid")
                if file.is_file()
            }
            processes.ask_for_stacks(
                [pid for pid in proc.descendants(os.getpid()) if str(pid) in ranks], wait
            )
            processes.end_below(processes.KILL_GRACE, wait=wait, reap=False)
            return not failed
    return False


def _reap(but: int) -> None:
    """Take the exit status of orphans that have ended; that of torchrun is left, so that its number
    stays its own.
    """
    for pid in proc.descendants(os.getpid()):
        if pid != but and not processes.runs(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        said if isinstance(said, dict) and {"rank", "code", "at", "killed"} <= said.keys() else None
    )


def guard(path: str, live: Live) -> NoReturn:
    """What torchrun starts: forks the rank, waits for it, notes its end, and ends in the same
    way.
    """
    processes.die_with_parent()
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    folder, rank = Path(request["folder"]), int(os.environ["RANK"])
    captures = Captures()
    pid = captures.fork(request["folder"], f"rank{rank}")
    if pid == 0:
        processes.die_with_parent()
        processes.become(lambda: live(request, rank), PROBE_FAILED)
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _ASKED_TO_END:
        signal.signal(number, forward)
    place(folder / f"rank{rank}.pid", str(pid))
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended:
        captures.wait(60.0)
        ended, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    said = {"rank": rank, "code": code, "at": time.time(), "killed": bool(asked)}
    captures.close()
    place(folder / f"rank{rank}.exit", json.dumps(said))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    processes.leave(code if code >= 0 else 1)

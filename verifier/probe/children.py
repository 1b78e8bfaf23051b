"""Processes that a rank starts by multiprocessing. Imports no torch.

A fork has what its rank has. Spawn and forkserver start a new interpreter, which imports the script
again, and CUDA on the CPU must be in place before that. What it unpickles first is a record of its
parent's `sys.path`, `__main__`, ...; a value in that record calls `begin`.
"""

import contextlib
import os
import sys
import time
import traceback
from multiprocessing import active_children, spawn, util
from pathlib import Path
from typing import Any

from ..isolation.inside import in_world
from ..trace.writer import Writer
from . import outputs
from .frames import Frames
from .imports import after_import

GRACE = 5.0  # seconds in which the children of a stopped rank may end by themselves
_ENTRY = Path(__file__).resolve().parents[1] / "__main__.py"
_FORKSERVER = "ignore"  # the name by which the server of forkserver asks


class _Begin:
    """Calls `begin` where it is unpickled, in an interpreter that need not find this package."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import runpy; runpy.run_path({str(_ENTRY)!r})['child']({self._request!r})",)


def hand_on(request: dict[str, Any]) -> None:
    """Let the processes that this one spawns call `begin` with `request`."""
    of_python = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = of_python(name)
        # would import the script as it is; each process that it forks imports it itself
        if name == _FORKSERVER:
            return {key: value for key, value in data.items() if not key.startswith("init_main")}
        return {"fsdp2": _Begin(request), **data}

    spawn.get_preparation_data = prepared


def begin(request: dict[str, Any]) -> None:
    """In the new process, before it imports the script."""
    hand_on(request)
    outputs.install()
    in_world(request["world"])
    if not request["cuda_on_cpu"]:
        return
    if "torch" in sys.modules:  # the server of forkserver imported it
        _substitute(request)
    else:
        after_import("torch", lambda module: _substitute(request))


def _substitute(request: dict[str, Any]) -> None:
    from ..launch.request import Request
    from .session import Session
    from .substitutes import cuda_on_cpu

    try:
        session = Session(
            Request.of(request),
            int(os.environ.get("RANK", 0)),
            Writer(Path(os.devnull)),
            Frames(request["project"]),
        )
        cuda_on_cpu.install(session)
        session.dispatcher.install()
    except Exception:
        traceback.print_exc()


def end() -> None:
    """In a rank that was stopped: end the processes that wait for what it no longer sends; at exit,
    Python would wait for them.
    """
    with contextlib.suppress(Exception):
        util._run_finalizers(0)  # type: ignore[attr-defined]  # of managers, which end their own process
    until = time.monotonic() + GRACE
    for child in active_children():
        if not child.daemon:
            child.join(max(0.0, until - time.monotonic()))
            child.kill()

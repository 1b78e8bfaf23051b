"""Killing this rank in the middle of a save, at the moment that the request names.

`{"rank": r, "call": n, "moment": m}`: rank r dies in its n-th save. Moments: "before-data" (it has planned, and written nothing),
"before-metadata" (all data is there; the coordinator has not written `.metadata`), "half-file" (half of a `torch.save`).
"""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import save  # before it is patched

from ..trace.events import Killed
from .compat.names import WRITING_PROCESS
from .dispatcher import Call
from .saving import place_of
from .session import Session

_OTHERS_SECONDS = 0.2  # what the other ranks get to write their part
_armed: list[str] = []


def install(session: Session, before_write: Callable[[], None]) -> None:
    """Subscribe to the file writer of DCP. `before_write` is called in the thread that is about to write."""
    moment = session.request["crash"].get("moment")

    def writing(call: Call) -> None:
        if moment == "before-data" and place_of(call.args[0]) in _armed:
            _die(session)
        before_write()

    def finishing(call: Call) -> None:
        if moment == "before-metadata" and place_of(call.args[0]) in _armed:
            _die(session)

    def given_away(call: Call) -> None:
        if moment == "before-data" and place_of(call.kwargs.get("checkpoint_id")) in _armed:
            _die(session)

    writer = "torch.distributed.checkpoint.filesystem:FileSystemWriter"
    session.dispatcher.around(f"{writer}.write_data", before=writing)
    session.dispatcher.around(f"{writer}.finish", before=finishing)
    session.dispatcher.around(WRITING_PROCESS, before=given_away)


def arm(session: Session, call: int, target: str) -> None:
    """A save begins; from now on its writes are deadly if it is the one that the request names."""
    wanted = session.request["crash"]
    if wanted and wanted["rank"] == session.rank and wanted["call"] == call:
        _armed.append(target)


def in_file(session: Session, call: int, value: object, target: str) -> None:
    """If this `torch.save` is the deadly one: write half of the file and die."""
    if target not in _armed or session.request["crash"].get("moment") != "half-file":
        return
    memory = io.BytesIO()
    save(value, memory)
    data = memory.getvalue()
    Path(target).write_bytes(data[: len(data) // 2])
    _die(session)


def _die(session: Session) -> None:
    session.write(Killed())
    session.writer.sync()
    if threading.current_thread() is not threading.main_thread():
        time.sleep(_OTHERS_SECONDS)  # an asynchronous save: the script goes on meanwhile
    time.sleep(_OTHERS_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

"""Kills this rank in the middle of a save, at the moment that the request names.

`{"rank": r, "call": n, "moment": m}`: rank r is killed in its n-th save. Moments: "before-data" (it
has planned, and written nothing), "before-metadata" (all data is written, and no `.metadata`),
"half-file" (half of a `torch.save`). Or before its n-th change of another kind: "before-rename" (of
what a save wrote), "before-file" (that it writes besides DCP's).
"""

import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import save  # before it is patched

from ..trace.events import Killed
from .compat.names import WRITING_PROCESS
from .dispatcher import Call
from .save_contents import place_of
from .session import Session

# A rank that dies leaves what the others have written meanwhile: they get this time for their part.
_OTHERS_SECONDS = 0.2  # in which the other ranks write their part
RENAME, FILE = "before-rename", "before-file"
_armed: list[str] = []
_changes = Counter[str]()


def install(session: Session, before_write: Callable[[], None]) -> None:
    """Subscribe to the file writer of DCP.

    `before_write` is called in the thread that is about to write.
    """

    def kill_at(moment: str, target: object) -> None:
        if session.request.crash.get("moment") == moment and place_of(target) in _armed:
            _kill(session)

    def writing(call: Call) -> None:
        kill_at("before-data", call.args[0])
        before_write()

    writer = "torch.distributed.checkpoint.filesystem:FileSystemWriter"
    session.around(f"{writer}.write_data", before=writing)
    session.around(f"{writer}.finish", before=lambda call: kill_at("before-metadata", call.args[0]))

    def process_writes(call: Call) -> None:
        kill_at("before-data", call.kwargs.get("checkpoint_id"))

    session.around(WRITING_PROCESS, before=process_writes, optional=True)


def arm(session: Session, call: int, target: str) -> None:
    """A save begins: if it is the one that the request names, one of its writes kills this rank."""
    wanted = session.request.crash
    if wanted and wanted["rank"] == session.rank and wanted["call"] == call:
        _armed.append(target)


def in_file(session: Session, call: int, value: object, target: str) -> None:
    """If the request names this `torch.save`: write half of the file and kill this rank."""
    if target not in _armed or session.request.crash.get("moment") != "half-file":
        return
    memory = io.BytesIO()
    save(value, memory)
    data = memory.getvalue()
    Path(target).write_bytes(data[: len(data) // 2])
    _kill(session)


def in_change(session: Session, moment: str) -> None:
    """The next change of a kind is about to be made: is it the one that the request names?"""
    _changes[moment] += 1
    wanted = session.request.crash
    if wanted and (wanted["rank"], wanted["moment"], wanted["call"]) == (
        session.rank,
        moment,
        _changes[moment],
    ):
        _kill(session)


def _kill(session: Session) -> None:
    session.write(Killed(moment=session.request.crash["moment"]))
    if threading.current_thread() is not threading.main_thread():
        time.sleep(_OTHERS_SECONDS)  # an asynchronous save: the script goes on meanwhile
    time.sleep(_OTHERS_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

"""The trace of one rank in one run: JSON lines, each marked (seal.py) and flushed, so that a crash loses nothing."""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from ..origin import is_machinery, is_user
from ..seal import mark


class Recorder:
    """Writes records `{"kind": ..., "seq": ..., "at": seconds, ...}` of one rank to `path`, from any of its threads.

    The mark of a line depends on its number, so records are numbered and appended one at a time. A signal handler may interrupt
    a write of its own thread: what it records is appended when that write is done.
    """

    def __init__(self, path: Path, project: str, secret: str = "") -> None:
        self._file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )  # what others write stays, and is seen
        self.path = path
        self.project = project
        self._process = os.getpid()
        self._seq = 0
        self._secret = secret
        self._lock = threading.RLock()
        self._writing = False
        self._deferred: list[dict[str, Any]] = []

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one record.

        A process forked from the rank, such as a data-loader worker, is not the rank: it records nothing. So it does not
        matter that the fork may have copied a lock that is held.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            record = {"kind": kind, "seq": 0, "at": time.monotonic(), **fields}
            if self._writing:
                self._deferred.append(record)
                return
            self._writing = True
            try:
                self._append(record)
                while self._deferred:
                    self._append(self._deferred.pop(0))
            finally:
                self._writing = False

    def _append(self, record: dict[str, Any]) -> None:
        number = record["seq"] = self._seq + 1
        text = json.dumps(record)
        line = f"{text}\t{mark(self._secret, number, text)}\n".encode()
        while line:
            line = line[os.write(self._file, line) :]
        self._seq = number

    def sync(self) -> None:
        """Make everything written so far survive this process."""
        if os.getpid() == self._process:
            os.fsync(self._file)

    def here(self) -> dict[str, Any] | None:
        """The line of the user's code that is running: the innermost frame in the project, else in no library of ours."""
        return next(iter(self.stack()), None)

    def stack(self, error: BaseException | None = None) -> list[dict[str, Any]]:
        """The frames of the user's code, innermost first, where we are or where `error` came up.

        They are those inside the project; if there are none, those outside torch, Python and the probe.
        """
        if error is not None:
            summary = traceback.extract_tb(error.__traceback__)
            places = [_place(f.filename, f.lineno or 0, f.name) for f in reversed(summary)]
        else:
            frame: FrameType | None = sys._getframe(1)
            places = []
            while frame is not None:
                places.append(_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
        own = [p for p in places if p["file"].startswith(self.project + os.sep) and is_user(p["file"])]
        return own or [p for p in places if not is_machinery(p["file"])]


def _place(file: str, line: int, function: str) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function, "code": linecache.getline(file, line).strip()}

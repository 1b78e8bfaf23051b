"""The trace of one rank in one run: JSON lines, each marked (seal.py) and unbuffered, so that a
killed process loses nothing.
"""

import json
import os
import threading
import time
from pathlib import Path

from .events import Event
from .seal import mark


class Writer:
    """Appends events of this process to `path`, from any of its threads.

    The mark of a line depends on its number, so events are numbered and appended one at a time. An
    event of a signal handler that interrupts a write of its thread is appended after that write.
    """

    def __init__(self, path: Path, secret: str = "") -> None:
        # appends, so that lines of other writers stay, and are detected
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.path = path
        self._process = os.getpid()
        self._seq = 0
        self._secret = secret
        self._lock = threading.RLock()
        self._writing = False
        self._deferred: list[tuple[Event, float]] = []

    def write(self, event: Event) -> None:
        """Append one event, with its number and time.

        A process forked from the rank, such as a data-loader worker, records nothing: it may have
        copied a held lock.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            now = time.time()
            if self._writing:
                self._deferred.append((event, now))
                return
            self._writing = True
            try:
                self._append(event, now)
                while self._deferred:
                    self._append(*self._deferred.pop(0))
            finally:
                self._writing = False

    def _append(self, event: Event, at: float) -> None:
        number = self._seq + 1
        text = json.dumps({"kind": event.kind, **event.to_json(), "seq": number, "at": at})
        line = f"{text}\t{mark(self._secret, number, text)}\n".encode()
        while line:
            line = line[os.write(self._file, line) :]
        self._seq = number

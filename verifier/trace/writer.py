"""The trace of one rank in one run: JSON lines, each marked (seal.py) and flushed, so that a crash loses nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from .events import Event
from .seal import mark


class Writer:
    """Appends events of this process to `path`; any thread may write."""

    def __init__(self, path: Path, secret: str = "") -> None:
        self._file = path.open("a", encoding="utf-8")  # so that what others write stays, and is seen
        self.path = path
        self._process = os.getpid()
        self._seq = 0
        self._secret = secret
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append one event, with its number and time.

        A process forked from the rank, such as a data-loader worker, is not the rank: it records nothing.
        """
        if os.getpid() != self._process:
            return
        fields = event.to_json()
        with self._lock:
            self._seq += 1
            text = json.dumps({"kind": event.kind, **fields, "seq": self._seq, "at": time.monotonic()})
            self._file.write(f"{text}\t{mark(self._secret, self._seq, text)}\n")
            self._file.flush()

    def sync(self) -> None:
        """Make everything written so far survive this process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._file.flush()
            os.fsync(self._file.fileno())

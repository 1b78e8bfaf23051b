"""What the ranks print, through pipes: the beginning and the end are kept, whatever the amount."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from pathlib import Path

HEAD = TAIL = 256 * 1024
_CHUNK = 65536


class Capture:
    """One stream of one rank: give `writer` to the rank, call `read` when `reader` has something,
    `close` at the end.
    """

    def __init__(self, path: Path) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._file = path.open("wb", buffering=0)
        self._room = HEAD
        self._tail: deque[bytes] = deque()
        self._held = 0
        self._dropped = 0

    def read(self) -> bool:
        """Take what is there, at most a chunk; whether more may come."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return True
        head, rest = data[: self._room], data[self._room :]
        if head:
            self._file.write(head)
            self._room -= len(head)
        if rest:
            self._tail.append(rest)
            self._held += len(rest)
            while self._held - len(self._tail[0]) >= TAIL:
                gone = len(self._tail.popleft())
                self._held -= gone
                self._dropped += gone
        return bool(data)

    def let_go(self) -> None:
        """Close the writer in the process that only reads."""
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        """Take what is left and end the file with the last part of what did not fit."""
        self.let_go()
        while select.select([self.reader], [], [], 0)[0] and self.read():
            pass
        if self._dropped:
            self._file.write(b"\n... (%d bytes left out) ...\n" % self._dropped)
        for part in self._tail:
            self._file.write(part)
        self._file.close()
        os.close(self.reader)


class Captures:
    """The streams of some processes, and a wait that ends at once when a child ends."""

    def __init__(self) -> None:
        self._open: list[Capture] = []
        self._all: list[Capture] = []
        self._wake, self._bell = os.pipe()
        for end in (self._wake, self._bell):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)

    def fork(self, folder: str, name: str) -> int:
        """`os.fork`; the output of the child goes to `name`.out and `name`.err in a folder."""
        pair = Capture(Path(folder) / f"{name}.out"), Capture(Path(folder) / f"{name}.err")
        self._all += pair
        self._open += pair
        pid = os.fork()
        if pid == 0:
            self._leave_to_parent(pair)
        else:
            for capture in pair:
                capture.let_go()
        return pid

    def wait(self, seconds: float) -> None:
        """Read until a child has ended or something was printed, or the time is over."""
        poll = select.poll()
        for capture in self._open:
            poll.register(capture.reader, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = {number for number, _ in poll.poll(max(seconds, 0.0) * 1000)}
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        for capture in [c for c in self._open if c.reader in ready]:
            if not capture.read():
                self._open.remove(capture)

    def _leave_to_parent(self, own: tuple[Capture, Capture]) -> None:
        """In a forked child: send its output to `own`, and close all other streams."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._bell)
        for capture, stream in zip(own, (1, 2), strict=True):
            os.dup2(capture.writer, stream)
        for capture in self._all:
            os.close(capture.reader)
            capture.let_go()
            capture._file.close()

    def close(self) -> None:
        """Finish every file."""
        for capture in self._all:
            capture.close()

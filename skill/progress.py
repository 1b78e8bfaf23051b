"""The progress of a verification on stderr: a line for each finished run and, on a terminal, the
current runs and their seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from ..verifier.report.wrapping import wrapped
from .output import log

TICK = 0.5  # seconds


class Live:
    """Called whenever a run begins or ends.

    On a terminal it rewrites the last line, with blanks and no escape sequences.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._running: dict[str, float] = {}
        self._shown = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="fsdp2-progress", daemon=True)

    def __enter__(self) -> Live:
        if self._terminal:
            self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._terminal:
            self._ticker.join()
        with self._lock:
            self._show("")

    def __call__(self, line: str, running: Sequence[str]) -> None:
        """`line` of a finished run, or ""; the names of the current runs."""
        with self._lock:
            now = time.monotonic()
            self._running = {name: self._running.get(name, now) for name in running}
            if line:
                self._show("")
                log("\n".join(wrapped(line, "  ", "    ")))
            self._show(self._running_line())

    def _tick(self) -> None:
        while not self._done.wait(TICK):
            with self._lock:
                self._show(self._running_line())

    def _running_line(self) -> str:
        """`running: train 2 ranks 3 s`, for each current run."""
        now = time.monotonic()
        runs = [f"{name} {now - since:.0f} s" for name, since in self._running.items()]
        return f"  running: {', '.join(runs)}" if runs else ""

    def _show(self, text: str) -> None:
        """Replace the terminal's last line; the text is cut at the terminal's width, so that it
        never wraps.
        """
        if not self._terminal or (not text and not self._shown):
            return
        try:
            text = text[: max(os.get_terminal_size(self._stream.fileno()).columns - 1, 0)]
            self._stream.write(f"\r{' ' * self._shown}\r{text}")
            self._stream.flush()
        except (OSError, ValueError):  # the terminal was closed
            self._terminal = False
        self._shown = len(text)

"""The guard's own thread: waits for measurements, compares them with other ranks', writes.

It also looks whether the training still moves (`laws/hang.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from . import prometheus
from .exchange import Exchange
from .measured import Measured

if TYPE_CHECKING:
    from .laws.hang import Hang
    from .watch import Guard

_LOOK = 0.25  # seconds between looks for questions of rank 0, and for a hang
_ASKING = 5.0  # seconds after a comparison in which rank 0 may ask
_LAST = 3.0  # seconds at the end of the process for what is still to be compared
DETAILS = "details"  # the question: which sketches a rank had at a step


class Worker:
    """The thread, which begins with the first measurement."""

    def __init__(self, guard: Guard, hang: Hang) -> None:
        self.guard = guard
        self.hang = hang
        self.exchange: Exchange | None = None
        self.answered: set[str] = set()
        self._items: queue.Queue[Measured | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._last = 0.0  # when the last comparison was
        self._before: Measured | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.exchange.world if self.exchange is not None else 1

    def give(self, measured: Measured) -> None:
        """Compare a measurement as soon as it is there."""
        self._items.put(measured)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fsdp2-guard", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """The process ends: compare what is there, within seconds."""
        if self._thread is None or os.getpid() != self.guard.process:
            return
        self._items.put(None)
        self._thread.join(_LAST)
        if self.guard.journal.rank == 0:
            self.guard.journal.write(
                "end", step=self.guard.step, breaches=len(self.guard.journal.breaches)
            )

    def ask(self, what: str, value: str) -> None:
        """Set a word that all ranks can look for."""
        if self.exchange is not None:
            self.exchange.ask(what, value)

    def asked(self, what: str) -> str:
        """The word that was set, "" if there is none."""
        return self.exchange.asked(what) if self.exchange is not None else ""

    def collect(self, kind: str, step: int) -> dict[int, dict[str, Any]]:
        """What all ranks have left, on rank 0."""
        assert self.exchange is not None
        return self.exchange.collect(kind, step, hurry=lambda: not self._items.empty())

    def ask_details(self, step: int) -> dict[int, dict[str, Any]]:
        """The sketches of all ranks at a step, tensor by tensor, on rank 0."""
        assert self.exchange is not None
        self.exchange.ask(DETAILS, str(step))
        self._answer()
        return self.exchange.collect(DETAILS, step, hurry=lambda: False, seconds=_ASKING)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                measured = self._items.get(timeout=_LOOK)
                if measured is None:
                    self._done()
                    return
                self._guarded(self._compare, measured)
            self._guarded(self.hang.look)
            if time.monotonic() - self._last < _ASKING:
                self._guarded(self._answer)

    def _guarded(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self.guard.journal.error(call.__qualname__, error)

    def _compare(self, measured: Measured) -> None:
        guard = self.guard
        if self.exchange is None:
            self.exchange = Exchange()
            guard.started(self.exchange.rank, self.exchange.world)
        exchange = self.exchange
        measured.wait()
        post: dict[str, Any] = {}
        for law in guard.laws:
            try:
                post[law.name] = law.post(measured)
                for breach in law.local(measured):
                    guard.found(breach)
            except Exception as error:
                guard.journal.error(type(law).__name__, error)
        if measured.kind == "file":
            return  # other ranks have none
        exchange.leave(measured.kind + measured.label, measured.step, post)
        self._last = time.monotonic()
        self._answer()
        if exchange.rank == 0:
            self._judge(measured)

    def _judge(self, measured: Measured) -> None:
        guard, exchange = self.guard, self.exchange
        assert exchange is not None
        posts = self.collect(measured.kind + measured.label, measured.step)
        for law in guard.laws:
            own = {rank: post.get(law.name, {}) for rank, post in posts.items()}
            try:
                for breach in law.judge(measured, own):
                    guard.found(breach)
            except Exception as error:
                guard.journal.error(type(law).__name__, error)
        if measured.kind == "check":
            late = sorted(set(range(exchange.world)) - set(posts))
            before, self._before = self._before, measured
            guard.journal.write("check", **_curves(measured, before), late=late, sent=exchange.sent)
            if guard.settings.prometheus:
                prometheus.write(guard.settings.prometheus, measured, guard.journal.breaches)

    def _answer(self) -> None:
        """Leave the sketches that rank 0 asks for."""
        assert self.exchange is not None
        step = self.exchange.asked(DETAILS)
        if step and step not in self.answered:
            self.answered.add(step)
            kept = self.guard.replicas.kept.get(int(step))
            if kept is not None:
                self.exchange.leave(DETAILS, int(step), kept)

    def _done(self) -> None:
        """Answer until rank 0 has judged what there is."""
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.rank == 0:
            exchange.ask("done", "1")
        until = time.monotonic() + _LAST
        while exchange.rank and time.monotonic() < until:
            self._guarded(self._answer)
            with contextlib.suppress(Exception):
                if exchange.asked("done"):
                    return
            time.sleep(0.05)


def _curves(measured: Measured, before: Measured | None) -> dict[str, Any]:
    """What the report draws of a check."""
    found: dict[str, Any] = {"step": measured.step, **measured.values.get("curves", {})}
    if before is not None and measured.step > before.step:
        seconds = (measured.time - before.time) / (measured.step - before.step)
        found["step_seconds"] = round(seconds, 6)
    return found

"""The guard's own thread: waits for measurements, compares them with other ranks', writes.

It also looks whether the training still moves (`laws/hang.py`).
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import prometheus
from .context import Context
from .exchange import ASKING, DETAILS, Exchange
from .laws import Law
from .laws.hang import Hang
from .measured import Measured

_LOOK = 0.25  # seconds between looks for questions of rank 0, and for a hang
_LAST = 3.0  # seconds at the end of the process for what is still to be compared


class Worker:
    """The thread, which begins with the first measurement."""

    def __init__(self, context: Context, laws: Sequence[Law], started: Callable[[], None]) -> None:
        self.context = context
        self._laws = laws
        self._started = started  # called once, when the ranks are known
        self._hang = Hang(context)
        self._process = os.getpid()
        self._answered: set[str] = set()
        self._items: queue.Queue[Measured | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._last = 0.0  # when the last comparison was
        self._before: Measured | None = None

    def give(self, measured: Measured) -> None:
        """Compare a measurement as soon as it is there."""
        measured.send()
        self._items.put(measured)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fsdp2-guard", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """The process ends: compare what is there, within seconds."""
        if self._thread is None or os.getpid() != self._process:
            return
        self._items.put(None)
        self._thread.join(_LAST)
        if self.context.journal.rank == 0:
            self.context.journal.write(
                "end", step=self.context.step, breaches=len(self.context.journal.breaches)
            )

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                measured = self._items.get(timeout=_LOOK)
                if measured is None:
                    self._done()
                    return
                self._guarded(self._compare, measured)
            self._guarded(self._hang.look)
            if time.monotonic() - self._last < ASKING:
                self._guarded(self._answer)

    def _guarded(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self.context.journal.error(call.__qualname__, error)

    def _compare(self, measured: Measured) -> None:
        context = self.context
        if context.exchange is None:
            context.exchange = Exchange()
            context.journal.rank = context.exchange.rank
            self._started()
        exchange = context.exchange
        measured.wait()
        post: dict[str, Any] = {}
        for law in self._laws:
            try:
                post[type(law).__name__] = law.post(measured)
                for breach in law.local(measured):
                    context.found(breach)
            except Exception as error:
                context.journal.error(type(law).__name__, error)
        if measured.kind == "file":
            return  # other ranks have none
        exchange.leave(measured.kind + measured.label, measured.step, post)
        self._last = time.monotonic()
        self._answer()
        if exchange.rank == 0:
            self._judge(measured)

    def _judge(self, measured: Measured) -> None:
        context, exchange = self.context, self.context.exchange
        assert exchange is not None
        kind = measured.kind + measured.label
        posts = exchange.collect(kind, measured.step, hurry=lambda: not self._items.empty())
        for law in self._laws:
            own = {rank: post.get(type(law).__name__, {}) for rank, post in posts.items()}
            try:
                for breach in law.judge(measured, own):
                    context.found(breach)
            except Exception as error:
                context.journal.error(type(law).__name__, error)
        if measured.kind == "check":
            late = sorted(set(range(exchange.world)) - set(posts))
            before, self._before = self._before, measured
            context.journal.write(
                "check", **_curves(measured, before), late=late, sent=exchange.sent
            )
            if context.settings.prometheus:
                prometheus.write(context.settings.prometheus, measured, context.journal.breaches)

    def _answer(self) -> None:
        """Leave the sketches that rank 0 asks for."""
        exchange = self.context.exchange
        if exchange is None or not exchange.rank:
            return
        step = exchange.asked(DETAILS)
        if step and step not in self._answered:
            self._answered.add(step)
            for kept in filter(None, (law.details(int(step)) for law in self._laws)):
                exchange.leave(DETAILS, int(step), kept)

    def _done(self) -> None:
        """Answer until rank 0 has judged what there is."""
        exchange = self.context.exchange
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

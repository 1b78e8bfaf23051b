"""Hang: which rank waits in which collective at which line, and which rank is not in it.

Each rank's own thread looks at the clock. A rank that has shown no sign of progress leaves its
stack for the others; rank 0 (or, where that says nothing, the lowest rank that does) puts them
together. A pause in which all ranks are at the same line, such as a save, is no hang.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from typing import Any

from ...probe.compat.groups import patience
from ...probe.compat.names import FLIGHT_RECORDER, find
from ...trace.origin import is_machinery, within_torch
from ..context import Context
from ..journal import Breach, of_ranks

EARLIER = 0.7  # of the time after which a collective raises, and the process ends
TIMES_USUAL = 30  # of the time of a usual step: an evaluation is no hang
WAIT = 5.0  # seconds in which other ranks may leave their stacks
_LAST = 3  # entries of the flight recorder that are written


class Hang:
    """Looks for a training that stands still."""

    name = "hang"

    def __init__(self, context: Context) -> None:
        self.context = context
        self._beat = context.beat
        self._said = False
        self._main = threading.main_thread().ident

    def look(self) -> None:
        """Called a few times a second."""
        beat = self.context.beat
        if beat != self._beat:
            self._beat, self._said = beat, False
        still = time.monotonic() - beat
        if self.context.began is None or self._said or still < 1.0:
            return
        limit = max(self.context.settings.hang, min(TIMES_USUAL * self._usual(), 3600.0))
        if still > min(limit, EARLIER * patience()):
            self._said = True
            self._stands(still)

    def _usual(self) -> float:
        """Seconds of a usual step."""
        made = max(1, self.context.made)
        return (self.context.beat - (self.context.began or 0.0)) / made

    def _stands(self, still: float) -> None:
        context, exchange = self.context, self.context.exchange
        own = {"step": context.step, **self._where()}
        context.journal.write("stall", seconds=round(still, 1), **own)
        if exchange is None:
            return
        # Steps of ranks differ by one around a hang: the key has none.
        exchange.leave("stall", 0, own)
        posts = exchange.collect("stall", 0, hurry=lambda: False, seconds=WAIT)
        if not posts or exchange.rank != min(posts):
            return
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, post in sorted(posts.items()):
            groups[post["line"], post["call"]].append(rank)
        silent = sorted({*range(exchange.world)} - {*posts})
        if len(groups) == 1 and not silent:
            context.journal.note(
                f"step {context.step}: all ranks have been at {own['line']} for long"
            )
            return
        # The ranks that are in no collective are waited for; else those that are in another one.
        outside = [ranks for (_, call), ranks in groups.items() if not call]
        odd = silent or min(outside or groups.values(), key=len)
        lines = [
            f"{of_ranks(ranks)} in {call or 'no collective'} at {line}"
            for (line, call), ranks in sorted(groups.items(), key=lambda one: len(one[1]))
        ]
        lines += [f"{of_ranks(silent)} without a sign"] if silent else []
        context.found(
            Breach(
                self.name,
                context.step,
                f"no step for {still:.0f} s: {'; '.join(lines)}",
                ranks=odd,
                place=posts[odd[0]]["line"] if odd[0] in posts else "",
                command=context.verify_command(),
                key="hang",
            )
        )

    def _where(self) -> dict[str, Any]:
        """The line of the user's code, and the function of torch.distributed, of the main
        thread.
        """
        frame = sys._current_frames().get(self._main or 0)
        line, call, lines = "", "", []
        while frame is not None:
            file = frame.f_code.co_filename
            if within_torch(file).startswith("distributed"):
                call = frame.f_code.co_name if not call or "wrapper" in call else call
            elif not is_machinery(file):
                lines.append(f"{file}:{frame.f_lineno}")
                line = line or lines[0]
            frame = frame.f_back
        return {"line": line, "call": call, "stack": lines[:8], "flight": _flight()}


def _flight() -> list[Any]:
    """The last collectives of this rank from NCCL's flight recorder, [] without one."""
    dump = find(FLIGHT_RECORDER)
    try:
        found = json.loads(dump()) if dump is not None else {}
    except Exception:
        return []
    entries = found.get("entries", []) if isinstance(found, dict) else []
    kept = ("profiling_name", "state", "collective_seq_id", "input_sizes")
    return [{key: one.get(key) for key in kept} for one in entries[-_LAST:]]

"""Counting the collectives of each step: how many of each kind, and the bytes that a rank puts in or takes out.

torch 2.13 has a public and a functional form of each; one calls the other, so only the outermost counts. A test holds the
counts against torch's own CommDebugMode.
"""

from __future__ import annotations

import threading

import torch
from torch.distributed.fsdp import FSDPModule

from ...trace.events import Place, TrafficLine
from ...trace.events import Traffic as Sent
from ..compat import groups, tensors
from ..compat.names import FUNCTIONAL
from ..dispatcher import Call, Leave
from ..session import Session
from .models import trained

KINDS = {
    "all_gather": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_tensor",
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
    ),
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "broadcast": ("broadcast",),
}


class Traffic:
    """What this rank has sent in the step that is being prepared; written when the next one begins."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = 1
        self.calls = 0
        self.model: dict[str, list[int]] = {}
        self.script: dict[str, list[int]] = {}
        self.lines: dict[tuple[str, int], tuple[int, Place]] = {}  # bytes that each line gathers
        self.expected: dict[str, int] = {}

    def add(self, kind: str, size: int) -> None:
        """One collective of `size` bytes, from within a forward or backward or from the script itself."""
        self._turn_page()
        inside = self.session.depth > 0 or self.session.in_backward
        entry = (self.model if inside else self.script).setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += size
        if not inside and kind == "all_gather" and (place := self.session.here()) is not None:
            key = (place.file, place.line)
            self.lines[key] = (self.lines.get(key, (0, place))[0] + size, place)

    def call(self) -> None:
        """The forward of a module with FSDP groups begins (again, if activation checkpointing recomputes it)."""
        self._turn_page()
        self.calls += 1

    def backward(self, given: list[torch.Tensor]) -> None:
        """A backward has ended: what it and its forward should have cost, by the groups that there are."""
        self._turn_page()
        for _, root in self.session.roots:
            for _, group in tensors.groups(root):
                for kind, number in groups.collectives(group, trained(root)).items():
                    self.expected[kind] = self.expected.get(kind, 0) + number

    def _turn_page(self) -> None:
        if (step := self.session.step_number()) == self.step:
            return
        largest = sorted(self.lines.values(), key=lambda line: -line[0])[:3]
        self.session.write(
            Sent(
                step=self.step,
                calls=self.calls,
                model=self.model,
                script=self.script,
                lines=[TrafficLine(at_line=place) for _, place in largest],
                expected=self.expected,
            )
        )
        self.step, self.calls, self.model, self.script, self.lines, self.expected = step, 0, {}, {}, {}, {}


def install(session: Session) -> None:
    """Count every collective from now on."""
    traffic = Traffic(session)

    def called(call: Call) -> None:
        if isinstance(call.args[0], FSDPModule):
            traffic.call()

    session.dispatcher.around("torch.nn:Module.__call__", before=called)
    busy: set[int] = set()  # threads in a collective
    for kind, names in KINDS.items():
        counter = _Counter(traffic, kind, busy)
        for name in names:
            for module in ("torch.distributed", "torch.distributed.distributed_c10d", FUNCTIONAL):
                session.dispatcher.around(f"{module}:{name}", before=counter.before, optional=True)
    if not session.stand_in:
        session.subscribe("backward", traffic.backward)


class _Counter:
    """Counts the outermost collectives of one kind."""

    def __init__(self, traffic: Traffic, kind: str, busy: set[int]) -> None:
        self._traffic = traffic
        self._kind = kind
        self._busy = busy

    def before(self, call: Call) -> Leave | None:
        """A collective begins."""
        thread = threading.get_ident()
        if thread in self._busy or _beside_training():
            return None
        self._busy.add(thread)

        def leave() -> None:
            self._busy.discard(thread)
            if call.failed is None:
                moved = tensors.tensors((call.args, call.kwargs, call.result))
                self._traffic.add(self._kind, max((t.numel() * t.element_size() for t in moved), default=0))

        return leave


def _beside_training() -> bool:
    """Whether this is a thread that Python started, such as that of a save: autograd's own threads are not."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)

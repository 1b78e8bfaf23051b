"""Counts the collectives of each step: how many of each kind, and the bytes that a rank sends or
receives.

torch 2.13 has a public and a functional form of each; one calls the other, so only the outermost
counts. A test compares the counts with torch's own CommDebugMode.
"""

import functools
import threading
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from ...trace.events import Place, TrafficLine
from ...trace.events import Traffic as Sent
from ..compat import groups, tensors
from ..compat.names import FUNCTIONAL
from ..dispatcher import Call, Leave
from ..session import Session
from .models import trained

# {kind: what may follow it in the name of a function}
KINDS = {
    "all_gather": ("", "_into_tensor", "_single", "_tensor", "_single_coalesced"),
    "reduce_scatter": ("", "_tensor", "_single", "_tensor_coalesced"),
    "all_reduce": ("", "_coalesced"),
    "all_to_all": ("", "_single"),
    "broadcast": ("",),
}


class Traffic:
    """What this rank has sent in the current step; written when the next one begins."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = 1
        self.calls = 0
        self.model: dict[str, list[int]] = {}
        self.script: dict[str, list[int]] = {}
        # bytes that the script gathers of parameters, or of what it computes from DTensors
        self.weights = 0
        self.lines: dict[tuple[str, int], tuple[int, Place]] = {}  # bytes that each line gathers
        self.expected: dict[str, int] = {}
        self.micros: list[dict[str, int]] = []  # of `model`, up to the end of each backward

    def add(self, kind: str, size: int, of_weights: Callable[[], bool]) -> None:
        """One collective of `size` bytes, from within a forward or backward or from the script
        itself.
        """
        self._next_step()
        progress = self.session.progress
        inside = progress.depth > 0 or progress.in_backward
        entry = (self.model if inside else self.script).setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += size
        if not inside and kind == "all_gather" and of_weights():
            self.weights += size
        if not inside and kind == "all_gather" and (place := self.session.here()) is not None:
            key = (place.file, place.line)
            self.lines[key] = (self.lines.get(key, (0, place))[0] + size, place)

    def call(self) -> None:
        """The forward of a module with FSDP groups begins, or its recomputation by activation
        checkpointing.
        """
        self._next_step()
        self.calls += 1

    def backward(self, given: list[torch.Tensor]) -> None:
        """A backward has ended: the collectives that it and its forward should need for the
        existing groups.
        """
        self._next_step()
        self.micros.append({kind: number for kind, (number, _) in self.model.items()})
        for _, root in self.session.roots:
            for _, group in groups.groups(root):
                for kind, number in groups.collectives(group, trained(root)).items():
                    self.expected[kind] = self.expected.get(kind, 0) + number

    def _next_step(self) -> None:
        if (step := self.session.progress.step_number()) == self.step:
            return
        largest = sorted(self.lines.values(), key=lambda line: -line[0])[:3]
        self.session.write(
            Sent(
                step=self.step,
                calls=self.calls,
                model=self.model,
                script=self.script,
                weights=self.weights,
                lines=[TrafficLine(at_line=place) for _, place in largest],
                expected=self.expected,
                micros=self.micros,
            )
        )
        self.step, self.calls, self.weights = step, 0, 0
        self.model, self.script, self.lines, self.expected, self.micros = {}, {}, {}, {}, []


def install(session: Session) -> None:
    traffic = Traffic(session)
    busy: set[int] = set()  # threads in a collective

    def called(call: Call) -> None:
        if isinstance(call.args[0], FSDPModule):
            traffic.call()

    def of_weights(given: list[torch.Tensor]) -> bool:
        """Whether a gather shares the memory of a parameter."""
        held = {tensors.address(slot.param) for slot in session.all_slots()} - {0}
        return any(tensors.address(t) in held for t in given)

    def before(call: Call, kind: str, functional: bool) -> Leave | None:
        thread = threading.get_ident()
        # Collectives of a thread that Python started (a background save) are not those of the step.
        if thread in busy or _beside_training():
            return None
        busy.add(thread)

        def leave() -> None:
            busy.discard(thread)
            if call.failed is None:
                moved = tensors.tensors((call.args, call.kwargs, call.result))
                size = max((t.numel() * t.element_size() for t in moved), default=0)
                traffic.add(kind, size, lambda: functional or of_weights(moved))

        return leave

    session.around("torch.nn:Module.__call__", before=called)
    for kind, endings in KINDS.items():
        # one object each, which a function has once under all its names
        plain, functional = (
            functools.partial(before, kind=kind, functional=value) for value in (False, True)
        )
        for ending in endings:
            for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
                session.around(f"{module}:{kind}{ending}", before=plain, optional=True)
            session.around(f"{FUNCTIONAL}:{kind}{ending}", before=functional, optional=True)
    if session.request.mode != "ddp":
        session.subscribe("backward", traffic.backward)


def _beside_training() -> bool:
    """Whether Python started this thread, as for a save; it does not start those of autograd."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)

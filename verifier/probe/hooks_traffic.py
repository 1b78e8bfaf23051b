"""Counting the collectives of each step: how many of each kind, and the bytes that a rank puts in or takes out.

torch 2.13 has a public and a functional form of each; one calls the other, so only the outermost counts. A test holds the
counts against torch's own CommDebugMode.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from . import grouplib, torchlib
from .guard import guard_methods
from .session import Session

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
        self.lines: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, int] = {}

    def add(self, kind: str, size: int) -> None:
        """One collective of `size` bytes, from within a forward or backward or from the script itself."""
        self._turn_page()
        inside = self.session.depth > 0 or self.session.in_backward
        entry = (self.model if inside else self.script).setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += size
        if not inside and kind == "all_gather" and (place := self.session.recorder.here()) is not None:
            line = self.lines.setdefault(f"{place['file']}:{place['line']}", {"count": 0, "bytes": 0, "at_line": place})
            line["count"] += 1
            line["bytes"] += size

    def call(self) -> None:
        """The forward of a module with FSDP groups begins (again, if activation checkpointing recomputes it)."""
        self._turn_page()
        self.calls += 1

    def backward(self) -> None:
        """A backward has ended: what it and its forward should have cost, by the groups that there are."""
        self._turn_page()
        for _, root in self.session.roots:
            trained = any(param.requires_grad for param in root.parameters())
            for _, group in torchlib.groups(root):
                for kind, number in grouplib.collectives(group, trained).items():
                    self.expected[kind] = self.expected.get(kind, 0) + number

    def _turn_page(self) -> None:
        if (step := self.session.step_number()) == self.step:
            return
        lines = sorted(self.lines.values(), key=lambda line: -line["bytes"])[:3]
        self.session.recorder.write(
            "traffic",
            step=self.step,
            calls=self.calls,
            model=self.model,
            script=self.script,
            lines=lines,
            expected=self.expected,
        )
        self.step, self.calls, self.model, self.script, self.lines, self.expected = step, 0, {}, {}, {}, {}


def install(session: Session) -> None:
    """Count every collective from now on."""
    traffic = Traffic(session)
    guard_methods(session.recorder, traffic, ("add", "call", "backward"))
    _count_collectives(traffic)
    _count_calls(traffic)
    if not session.stand_in:
        _count_backwards(traffic)


def _count_calls(traffic: Traffic) -> None:
    call = nn.Module.__call__

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, FSDPModule) and not torch.compiler.is_compiling():
            traffic.call()
        return call(module, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]


def _beside_training() -> bool:
    """Whether this is a thread that Python started, such as that of a save: autograd's own threads are not."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _count_backwards(traffic: Traffic) -> None:
    ended = traffic.session.on_backward

    def heard(tensors: list[torch.Tensor]) -> None:
        traffic.backward()
        ended(tensors)

    traffic.session.on_backward = heard  # type: ignore[method-assign]


def _count_collectives(traffic: Traffic) -> None:
    busy: set[int] = set()  # threads in a collective

    def heard(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def ran(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread in busy or torch.compiler.is_compiling() or _beside_training():
                return real(*args, **kwargs)
            busy.add(thread)
            try:
                result = real(*args, **kwargs)
            finally:
                busy.discard(thread)
            moved = [t for t in torchlib.leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            traffic.add(kind, max((t.numel() * t.element_size() for t in moved), default=0))
            return result

        return ran

    for kind, names in KINDS.items():
        for name in names:
            heard_already: dict[Any, Any] = {}
            for place in (dist, distributed_c10d, functional):
                if (real := getattr(place, name, None)) is not None:
                    wrapper = heard_already.setdefault(real, heard(kind, real))
                    setattr(place, name, wrapper)

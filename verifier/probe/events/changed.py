"""Where the script changes gradients between the last backward of the first step and this step.

A profile function looks at the first and the last gradient at each call and return in between, so
that any operation is seen, whoever makes it. It is not set where a script has one of its own. torch
counts no version where `_foreach_mul_` changes DTensors (2.13.0), so that the memory of their
largest element is read; on other devices than the CPU the version is all that is looked at.
"""

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...trace.events import ChangedGradients
from ..compat.tensors import local, version
from ..session import Session

PLACES = 8


def install(session: Session) -> None:
    if not session.request.scales:
        return
    watch = Watch(session)

    def called(module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        watch.end()

    session.subscribe("backward", lambda tensors: watch.begin())
    session.subscribe("call", called)
    session.subscribe("before backward", watch.end)
    session.subscribe("stepping", lambda optimizer, closure: watch.end(), first=True)


class Gradient:
    """What is looked at of one gradient."""

    def __init__(self, param: torch.Tensor, grad: torch.Tensor, on_cpu: bool) -> None:
        self._param, self._grad, self._part = param, grad, local(grad)
        self._address = self._size = 0
        plain = (
            type(self._part) is torch.Tensor
            and self._part.layout == torch.strided
            and self._part.is_contiguous()
        )
        if plain and self._part.numel() and (on_cpu or self._part.device.type == "cpu"):
            largest = int(self._part.abs().argmax())
            self._size = self._part.element_size()
            self._address = self._part.data_ptr() + largest * self._size
        self.known = self.now()

    def now(self) -> tuple[object, ...]:
        grad = self._param.grad
        version_of = 0 if self._size else version(self._grad) + version(self._part)
        return (
            grad is None or grad is self._grad,
            version_of,
            ctypes.string_at(self._address, self._size),
        )


class Watch:
    """The first and the last gradient of one rank, between a backward and what follows it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._grads: list[Gradient] = []

    def begin(self) -> None:
        """A backward has ended."""
        session = self._session
        if session.progress.step_number() > 1 or not session.roots or sys.getprofile() is not None:
            return
        held = [slot.param for slot in session.all_slots() if slot.param.grad is not None]
        looked_at, on_cpu = held[:1] + held[1:][-1:], bool(session.request.cuda_on_cpu)
        self._grads = [
            Gradient(param, param.grad, on_cpu) for param in looked_at if param.grad is not None
        ]
        if self._grads:
            sys.setprofile(self._at)

    def end(self) -> None:
        """The next backward, a forward or the step begins."""
        if self._grads:
            self._grads = []
            sys.setprofile(None)

    def _at(self, frame: FrameType, event: str, argument: Any) -> None:
        """A call or a return: an exception in here would be raised in the script."""
        try:
            changed = False
            for grad in self._grads:
                if (now := grad.now()) != grad.known:
                    grad.known, changed = now, True
            if changed:
                self._changed()
        except Exception as error:
            self.end()
            self._session.report("changed gradients", error)

    def _changed(self) -> None:
        session = self._session
        place = session.here()
        if (
            place is not None
            and session.first(("changed", place))
            and session.first("changed", most=PLACES)
        ):
            session.write(ChangedGradients(at_line=place))

"""Where the script changes gradients between the last backward of the first step and this step.

A profile function looks at the versions of a few gradients at each call and return in between: any operation in place is seen, whoever
makes it. It is not set where a script has one of its own.
"""

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
    if session.request["mode"] != "fsdp":
        return
    watch = Watch(session)

    def called(module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        watch.end()

    session.subscribe("backward", lambda tensors: watch.begin())
    session.subscribe("call", called)
    session.subscribe("before backward", watch.end)
    session.subscribe("stepping", lambda optimizer, closure: watch.end(), first=True)


class Watch:
    """The first and the last gradient of one rank, between a backward and what follows it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._grads: list[torch.Tensor] = []
        self._known: list[int] = []

    def begin(self) -> None:
        """A backward has ended."""
        session = self._session
        if session.step_number() > 1 or not session.roots or sys.getprofile() is not None:
            return
        held = [slot.param.grad for slot in session.all_slots() if slot.param.grad is not None]
        self._grads = [
            one for grad in held[:1] + held[1:][-1:] for one in (grad, local(grad))
        ]  # each has a count of its own
        self._known = [version(grad) for grad in self._grads]
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
            now = [version(grad) for grad in self._grads]
            if now != self._known:
                self._known = now
                self._changed()
        except Exception as error:
            self.end()
            self._session.report("changed gradients", error)

    def _changed(self) -> None:
        session = self._session
        place = session.here()
        if place is not None and session.first(("changed", place)) and session.first("changed", most=PLACES):
            session.write(ChangedGradients(at_line=place))

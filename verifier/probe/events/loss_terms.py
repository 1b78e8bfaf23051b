"""What the loss of the first micro-batch is made of: the single numbers with a gradient that
functions of the project hold or return between its first forward and its backward, and how they
weigh in the loss.

The frames of the project are followed by a trace function for so long; with a debugger or a
coverage tool, or where the script compiles, nothing is recorded.
"""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...launch.request import ONE_PROCESS
from ...trace.events import LossTerm, LossTerms
from ..dispatcher import Call
from ..frames import line_at
from ..session import Session
from ..watched import variables

_MOST = 128  # terms
_ITEMS = 16  # of a tuple, list or dict that is returned
_Trace = Callable[[types.FrameType, str, Any], Any]


class Terms:
    """Those of this rank, in the order in which they were first seen."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.done = session.request.mode in ONE_PROCESS
        self.open = False
        self.followed: list[types.FrameType] = []  # that were running as it began
        self.seen: dict[int, torch.Tensor] = {}  # by id, held so that no other gets it
        self.terms: list[LossTerm] = []
        self.weights: dict[int, float] = {}  # by id
        self.named = Counter[tuple[str, str]]()

    def compiles(self, call: Call) -> None:
        """The script compiles: a trace function would change how."""
        self._close()
        self.terms, self.seen = [], {}

    def unused(self, *_: object) -> None:
        """A step, or the end, comes without a backward of `torch.autograd.backward`: nothing is
        followed any longer, and no graph is held.
        """
        if self.open and not self.done:
            self._close()
            self.terms, self.seen = [], {}

    def called(self, module: nn.Module, given: object) -> None:
        """A module is called by the script."""
        if self.done or self.open or not torch.is_grad_enabled() or self.session.dormant:
            return
        if all(module is not root for _, root in self.session.roots):
            return
        if sys.gettrace() is not None:
            self.done = True
            return
        self.open = True
        self.followed = list(self.session.frames.own())
        for frame in self.followed:
            frame.f_trace, frame.f_trace_lines = self._traced, False
        sys.settrace(self._entered)

    def ends(self) -> None:
        """The backward begins: what its callers hold is the last."""
        if not self.open or self.done:
            return
        self._close()
        for frame in self.session.frames.own():
            self._note(frame, _named(frame))

    def _close(self) -> None:
        self.done = True
        if sys.gettrace() == self._entered:
            sys.settrace(None)
        for frame in self.followed:
            frame.f_trace = None
        self.followed = []

    def ended(self, tensors: list[torch.Tensor]) -> None:
        """The backward has ended, and the weights are known."""
        if self.terms:
            pairs = zip(self.terms, self.seen, strict=True)
            terms = [replace(term, weight=self.weights.get(key)) for term, key in pairs]
            self.session.write(LossTerms(terms=terms))
        self.terms, self.seen = [], {}

    def _entered(self, frame: types.FrameType, event: str, argument: Any) -> _Trace | None:
        if not self.session.frames.owns(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        return self._traced

    def _traced(self, frame: types.FrameType, event: str, argument: Any) -> _Trace:
        if event == "return" and self.open and not self.done:
            self.session.guarded(self._returned)(frame, argument)
        return self._traced

    def _returned(self, frame: types.FrameType, value: Any) -> None:
        if torch.is_grad_enabled():
            self._note(frame, [*_named(frame), *_items(value)])

    def _note(self, frame: types.FrameType, named: list[tuple[str, Any]]) -> None:
        code = frame.f_code
        function = code.co_qualname
        for name, value in named:
            if not _is_term(value) or id(value) in self.seen or len(self.terms) >= _MOST:
                continue
            self.named[function, name] += 1
            self.seen[id(value)] = value
            value.register_hook(self._weigh(id(value)))
            self.terms.append(
                LossTerm(
                    name=name,
                    time=self.named[function, name],
                    value=float(value.detach()),
                    weight=None,
                    line=line_at(code.co_filename, frame.f_lineno, function),
                )
            )

    def _weigh(self, key: int) -> Callable[[torch.Tensor], None]:
        def weigh(gradient: torch.Tensor) -> None:
            self.weights[key] = float(gradient)

        return weigh


def _named(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame that have a name of their own."""
    of_module = frame.f_locals is frame.f_globals
    found = list(frame.f_globals.items()) if of_module else variables(frame)
    return [(name, value) for name, value in found if name.isidentifier()]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function returns: one value, or those in a tuple, list or dict."""
    if isinstance(value, dict):
        yield from ((str(key), one) for key, one in list(value.items())[:_ITEMS])
    elif isinstance(value, tuple | list):
        yield from (("", one) for one in value[:_ITEMS])
    else:
        yield "", value


def _is_term(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.numel() == 1
        and value.grad_fn is not None
        and value.is_floating_point()
        and value.device.type != "meta"
    )


def install(session: Session) -> None:
    """Subscribe to calls and backwards of the script, and to what it compiles."""
    terms = session.one(Terms)
    session.around("torch:compile", before=terms.compiles)
    session.subscribe("call", terms.called)
    session.subscribe("before backward", terms.ends)
    session.subscribe("backward", terms.ended)
    for notice in ("stepping", "stop", "ended"):
        session.subscribe(notice, terms.unused)

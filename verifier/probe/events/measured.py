"""Numbers that an evaluation makes: of each call of the project in which models run without
gradients alone, what it returns.

The frames around a forward without gradients are followed to their ends by a trace function, which
is there for no longer. A frame in which a backward, or a forward with gradients, runs is no
evaluation. Of nested calls the outermost one that makes numbers counts.
"""

import hashlib
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...launch.request import ONE_PROCESS
from ...trace.events import UNKNOWN, Measured
from ..compat.tensors import elements, layout, local
from ..dispatcher import Call
from ..measures import random_state
from ..session import Session
from ..tensor_fingerprint import row_hashes
from ..watched import variables
from .randomness import FUNCTIONS

_DEPTH = 3
_VALUES = 64  # of one call
# A line that calls so often between two steps does it for each batch: not the evaluation's own
# number.
_CALLS = 8  # of one line between two steps, from which on it is one of many
_TRAINED = 4096
_Frame = tuple[int, types.CodeType]


class Measures:
    """The frames of this rank that may be evaluations, and what has ended of them since the last
    training step.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        # that are followed, and how many had ended before
        self.open: dict[_Frame, tuple[types.FrameType, int]] = {}
        self.trained: set[_Frame] = set()
        self.ended: list[Measured] = []  # within frames that are open
        self.drew: list[object] = []  # hashes of what was drawn since the first of them was opened
        self.before = ("", "")  # the states of the generators at that time

    def called(self, module: nn.Module, given: object) -> None:
        """A module is called by the script."""
        if all(module is not root for _, root in self.session.roots):
            return
        if torch.is_grad_enabled():
            self.trains()
            return
        progress = self.session.progress
        if progress.step_number() <= self.session.request.steps and not progress.in_backward:
            self._follow()

    def trains(self) -> None:
        """A forward with gradients, or a backward, begins: the frames around it are no
        evaluations.
        """
        frames = {_key(frame) for frame in self._frames()}
        if len(self.trained) > _TRAINED:
            self.trained.clear()
        self.trained |= frames
        if self.open:
            for key in frames & self.open.keys():
                self._let_go(key)
            self._flush()

    def draws(self, call: Call) -> None:
        """A function of torch has drawn."""
        if self.open and isinstance(call.result, torch.Tensor):
            self.drew += row_hashes([local(call.result).detach().reshape(1, -1)])

    def _drew(self) -> str:
        """What the event says of the draws since the first frame was opened."""
        (torchs, others), (torch_before, others_before) = _states(), self.before
        # Draws of Python or NumPy cannot be seen one by one: it is not known whether two runs drew
        # the same (exam round 12, missed: an evaluation whose data are drawn by seeded generators).
        if others != others_before:
            return UNKNOWN
        drew = [*self.drew, torchs] if torchs != torch_before else self.drew
        return hashlib.sha256(repr(drew).encode()).hexdigest()[:16] if drew else ""

    def _frames(self) -> Iterator[types.FrameType]:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.session.frames.owns(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def _follow(self) -> None:
        # A trace function of a debugger or a coverage tool stays: then evaluations are not followed
        # (debuggers and coverage tools).
        if sys.gettrace() not in (None, _no_line):
            return  # a debugger's, or that of a coverage
        for frame in self._frames():
            key, flags = _key(frame), frame.f_code.co_flags
            once = not flags & (
                inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
            )
            if (
                once
                # A module's own frame ends with the script: it returns no evaluation.
                and frame.f_code.co_name != "<module>"
                and key not in self.trained
                and key not in self.open
            ):
                if not self.open:
                    self.drew, self.before = [], _states()
                self.open[key] = frame, len(self.ended)
                frame.f_trace_lines = False
                frame.f_trace = self._traced
        if self.open:
            sys.settrace(_no_line)

    def _traced(self, frame: types.FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "return" and _key(frame) in self.open:
            self.session.guarded(self._returned)(frame, argument)
        return self._traced

    def _returned(self, frame: types.FrameType, value: Any) -> None:
        session = self.session
        before = self._let_go(_key(frame))
        with torch.no_grad():
            values = dict(_numbers(value, "returned", session.rank, 0))
            if value is None and len(self.ended) == before:
                values = {
                    k: v
                    for name, one in _own(frame)
                    for k, v in _numbers(one, name, session.rank, 0)
                }
        stack = session.frames.stack()
        if values and session.first(
            (session.progress.step_number(), stack[0].file, stack[0].line), most=_CALLS
        ):
            self.ended[before:] = [
                Measured(
                    step=session.progress.step_number(),
                    function=frame.f_code.co_qualname,
                    values=dict(list(values.items())[:_VALUES]),
                    drew=self._drew(),
                    caller=stack[1] if len(stack) > 1 else None,
                    at_line=stack[0],
                )
            ]
        self._flush()

    def _let_go(self, key: _Frame) -> int:
        frame, before = self.open.pop(key)
        frame.f_trace = None
        return before

    def _flush(self) -> None:
        """Nothing is open any more: write what has ended, and trace no longer."""
        if not self.open:
            if sys.gettrace() is _no_line:
                sys.settrace(None)
            for one in self.ended:
                self.session.write(one)
            self.ended = []


def _no_line(frame: types.FrameType, event: str, argument: Any) -> None:
    """Frames that begin are not followed."""


def _own(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame that are none of its arguments."""
    code = frame.f_code
    given = code.co_argcount + code.co_kwonlyargcount
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    arguments = code.co_varnames[: given + sum(bool(code.co_flags & flag) for flag in flags)]
    return [(name, value) for name, value in variables(frame) if name not in arguments]


def _key(frame: types.FrameType) -> _Frame:
    return id(frame), frame.f_code


def _states() -> tuple[str, str]:
    """Digests of the states of this rank's global generators: torch's, and those of Python and
    NumPy.
    """
    numpy = sys.modules.get("numpy")
    others = (random.getstate(), numpy.random.get_state() if numpy is not None else None)
    return random_state(), hashlib.sha256(repr(others).encode()).hexdigest()[:16]


def _numbers(value: Any, path: str, rank: int, depth: int) -> Iterator[tuple[str, float]]:
    """(path, number) of the floats and the tensors of one float that a value holds."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, torch.Tensor):
        one = value.numel() == 1 and value.is_floating_point() and value.device.type != "meta"
        if one and not layout(value, rank).sharded:
            yield path, float(elements(local(value)))
    elif depth < _DEPTH:
        if isinstance(value, Mapping):
            items = [(f"{path}[{key!r}]", item) for key, item in list(value.items())[:_VALUES]]
        elif isinstance(value, list | tuple):
            items = [(f"{path}[{at}]", item) for at, item in enumerate(value[:_VALUES])]
        elif isinstance(value, types.SimpleNamespace) or hasattr(
            type(value), "__dataclass_fields__"
        ):
            items = [(f"{path}.{key}", item) for key, item in list(vars(value).items())[:_VALUES]]
        else:
            return
        for name, item in items:
            yield from _numbers(item, name, rank, depth + 1)


def install(session: Session) -> None:
    """Subscribe to calls and backwards of the script, and to what draws."""
    if session.request.mode in ONE_PROCESS:
        return
    measures = Measures(session)
    session.subscribe("call", measures.called)
    session.subscribe("before backward", measures.trains)
    for target in FUNCTIONS:
        session.around(target, after=measures.draws)

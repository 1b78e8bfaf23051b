"""Where the samples of the first step came into the script: the line that bound the batch, or passed it on."""

import ast
import linecache
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...trace.events import Fed, Place
from ..frames import place_at
from ..session import Session
from ..watched import variables

DEEPEST = 3  # containers within one another in which a batch is looked for
WIDEST = 64  # of their items


def install(session: Session) -> None:
    """Look at each forward up to the first step, in the run that is judged: the first may be one of a dry run."""
    if session.request["mode"] != "fsdp":
        return

    def called(module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        roots = any(module is root for _, root in session.roots)
        if not roots or not module.training or not torch.is_grad_enabled() or session.step_number() > 1:
            return
        held = {id(tensor) for tensor in given() if tensor.grad_fn is None}
        place = _origin(session, held) if held else None
        if place is not None and session.first(("fed", place)):
            session.write(Fed(at_line=place))

    session.subscribe("call", called)


def _origin(session: Session, held: set[int]) -> Place | None:
    """In the outermost frame of the project that holds one of these tensors."""
    frames = [*session.frames.own()]
    for number, frame in reversed([*enumerate(frames)]):
        names = variables(frame) if frame.f_locals is not frame.f_globals else [*frame.f_globals.items()]
        inside = [(depth, name) for name, value in names if (depth := _depth(value, held)) is not None]
        if not inside:
            continue
        name, code, above = max(inside)[1], frame.f_code, frames[number + 1 :]
        if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return place_at(frame, _bound(frame, name), above)
        return place_at(above[0], above[0].f_lineno, above[1:]) if above else None  # the caller passed it
    return None


def _depth(value: Any, held: set[int], depth: int = 0) -> int | None:
    """In how many containers within `value` one of the tensors lies; None if it is not in there."""
    if id(value) in held:
        return depth
    if depth == DEEPEST or not isinstance(value, list | tuple | dict) or len(value) > WIDEST:
        return None
    inside = value.values() if isinstance(value, dict) else value
    return max((found for one in inside if (found := _depth(one, held, depth + 1)) is not None), default=None)


def _bound(frame: FrameType, name: str) -> int:
    """The last line up to the running one that binds a name in this frame's file; the running one if none does."""
    lines = linecache.getlines(frame.f_code.co_filename)
    first = frame.f_code.co_firstlineno
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return frame.f_lineno
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    bound = [node.lineno for node in stores if node.id == name and first <= node.lineno <= frame.f_lineno]
    return max(bound, default=frame.f_lineno)

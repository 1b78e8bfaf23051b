"""Where the samples of the first step came into the script: the line that bound the batch, or
passed it on.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import nn

from ...trace.events import Fed, Line, Place
from ...trace.origin import is_machinery
from ..compat.tensors import address
from ..frames import line_at, place_at, tree_of
from ..session import Session
from ..watched import variables

DEEPEST = 3  # containers within one another in which a batch is looked for
WIDEST = 64  # of their items
Wanted = Callable[[torch.Tensor], bool]


def install(session: Session) -> None:
    """Look at each forward up to the first step, in the run that is judged: the first may be one of
    a dry run.
    """
    if session.request.mode != "fsdp":
        return

    def called(module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        roots = any(module is root for _, root in session.roots)
        if (
            not roots
            or not module.training
            or not torch.is_grad_enabled()
            or session.progress.step_number() > 1
        ):
            return
        held = [tensor for tensor in given() if tensor.grad_fn is None]
        place = _origin(session, held) if held else None
        if place is not None and session.first(("fed", place)):
            session.write(Fed(at_line=place))

    session.subscribe("call", called)


def _origin(session: Session, held: list[torch.Tensor]) -> Place | None:
    """Where one of these tensors was bound, else what they are parts of: `model(batch[:, :-1])`."""
    same, memory = {id(tensor) for tensor in held}, {*map(address, held)} - {0}
    exact = _bound_to(session, lambda tensor: id(tensor) in same)
    return exact or _bound_to(session, lambda tensor: address(tensor) in memory)


def _bound_to(session: Session, wanted: Wanted) -> Place | None:
    """In the outermost frame of the project that holds such a tensor."""
    frames = [*session.frames.own()]
    for number, frame in reversed([*enumerate(frames)]):
        names = (
            variables(frame)
            if frame.f_locals is not frame.f_globals
            else [*frame.f_globals.items()]
        )
        inside = [
            (found, name) for name, value in names if (found := _within(value, wanted)) is not None
        ]
        if not inside:
            continue
        name, code, above = max(inside)[1], frame.f_code, frames[number + 1 :]
        if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            bound = _bound(frame, name)
            place = place_at(frame, bound.lineno if bound else frame.f_lineno, above)
            return replace(
                place, through=_makers(bound, {**frame.f_globals, **dict(names)}, code.co_filename)
            )
        return (
            place_at(above[0], above[0].f_lineno, above[1:]) if above else None
        )  # the caller passed it
    return None


def _within(value: Any, wanted: Wanted, depth: int = 0) -> tuple[int, int] | None:
    """(in how many containers within `value` such a tensor lies, its size below 0); None if it is
    not in there.
    """
    if isinstance(value, torch.Tensor):
        return (depth, -value.numel()) if wanted(value) else None
    if depth == DEEPEST or not isinstance(value, list | tuple | dict) or len(value) > WIDEST:
        return None
    inside = value.values() if isinstance(value, dict) else value
    return max(
        (found for one in inside if (found := _within(one, wanted, depth + 1)) is not None),
        default=None,
    )


def _bound(frame: FrameType, name: str) -> ast.stmt | None:
    """The last statement up to the running line that binds a name in this frame's file."""
    first = frame.f_code.co_firstlineno
    before = (
        node
        for node in tree_of(frame.f_code.co_filename)
        if isinstance(node, ast.Assign | ast.For | ast.AnnAssign | ast.With)
    )
    binds = [
        node for node in before if first <= node.lineno <= frame.f_lineno and name in _stored(node)
    ]
    return max(binds, key=lambda node: node.lineno, default=None)


def _stored(statement: ast.stmt) -> set[str]:
    """The names that the head of a statement binds."""
    heads = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
    names = (node for head in heads for node in ast.walk(head) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _makers(statement: ast.stmt | None, names: dict[str, Any], besides: str) -> list[Line]:
    """The function of another file from which a statement takes the value that it binds: `x, y =
    loader.next_batch()`.
    """
    source = getattr(statement, "iter", None) or getattr(statement, "value", None)
    for node in ast.walk(source) if source is not None else ():
        code = _code(_value(node, names))
        if code is not None and code.co_filename != besides and not is_machinery(code.co_filename):
            return [line_at(code.co_filename, code.co_firstlineno, code.co_name)]
    return []


def _value(node: ast.AST, names: dict[str, Any]) -> Any:
    """What a name or an attribute of one stands for, without running code of its own."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _value(node.value, names)) is not None:
        return inspect.getattr_static(owner, node.attr, None)
    return None


def _code(value: Any) -> CodeType | None:
    """The code of a function or generator, or with which an object gives its next value."""
    if isinstance(value, GeneratorType):
        return value.gi_code
    if not isinstance(value, FunctionType):
        steps = (
            inspect.getattr_static(type(value), f"__{name}__", None)
            for name in ("next", "iter", "call")
        )
        value = next((step for step in steps if isinstance(step, FunctionType)), None)
    made = inspect.unwrap(value) if value is not None else None
    return made.__code__ if isinstance(made, FunctionType) else None

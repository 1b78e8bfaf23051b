"""`Module.to_empty`: uninitialised memory, filled with a mark that shows what the script does not
initialise.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ...trace.events import Line, Place, ToEmpty, Unset
from ...trace.origin import is_machinery
from ..compat.tensors import local
from ..dispatcher import Call
from ..frames import line_at, tree_of
from ..session import Session

_NAMES = 8
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Fills:
    """The tensors that `to_empty` allocated and the probe filled with the mark."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.any = False
        self.lines: list[Place] = []  # that called it

    def emptied(self, call: Call) -> None:
        """A module was given uninitialised memory."""
        session = self.session
        place = session.here()
        session.write(ToEmpty(at_line=place))
        if not session.request.fill:
            return
        self.lines.extend([place] if place is not None else [])
        with torch.no_grad():
            for tensor in [*call.args[0].parameters(), *call.args[0].buffers()]:
                self.any = True
                part = local(tensor)
                if part.is_floating_point():
                    part.fill_(float("nan"))
                elif part.dtype in _INTEGERS:
                    part.fill_(torch.iinfo(part.dtype).min)

    def unset(self, tensor: torch.Tensor) -> int:
        """Elements that still hold the mark (0: all were written)."""
        part = local(tensor)
        if self.any and part.is_floating_point():
            return int(part.isnan().sum())
        if self.any and part.dtype in _INTEGERS:
            return int((part == torch.iinfo(part.dtype).min).sum())
        return 0

    def adopted(self, root: nn.Module, name: str) -> None:
        """A root is recorded: report what the script has not initialised."""
        session, lines = self.session, self.lines
        named = [*root.named_parameters(), *root.named_buffers()] if lines else []
        for key in [key for key, tensor in named if self.unset(tensor)][:_NAMES]:
            if (line := next(_holders(root, key), None)) is not None:
                own = session.frames.owns(line.file)
                place = Place(**line.to_json()) if own else replace(lines[0], library=line)
                session.write(Unset(name=name + key, at_line=place))


def install(session: Session) -> None:
    """Record each `to_empty`; if the request says so, fill what it allocates."""
    fills = session.one(Fills)
    session.around("torch.nn:Module.to_empty", after=fills.emptied)
    session.subscribe("adopt", fills.adopted)


def _holders(root: nn.Module, key: str) -> Iterator[Line]:
    """Where the classes that hold a parameter or buffer name it, or what it is in: the innermost
    that is not torch's first.
    """
    path = key.split(".")
    for end in range(len(path) - 1, -1, -1):
        holder, name = root.get_submodule(".".join(path[:end])), path[end]
        for cls in type(holder).__mro__:
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
            if file and not is_machinery(file) and (line := _names(cls, file, name)):
                yield line_at(file, line, cls.__name__)


def _names(cls: type, file: str, name: str) -> int:
    """The first line of a class that has a name as text (`register_buffer`) or as an attribute of
    `self` that it sets; 0 without one.
    """
    classes = (
        node
        for node in tree_of(file)
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    for node in (node for body in classes for node in ast.walk(body)):
        if isinstance(node, ast.Constant) and node.value == name:
            return node.lineno
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == name
        ):
            return node.lineno
    return 0

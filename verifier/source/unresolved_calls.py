"""Recording, while calls are followed, which of them lead to code that is not visible."""

from __future__ import annotations

import ast

from .coverage import DECORATED, UNKNOWN, outside
from .events import is_optimizer
from .expressions import Expressions
from .project import Module
from .values import Value, holders

_DEFINED = ast.FunctionDef | ast.AsyncFunctionDef
_MODULES = ("module", "child")  # items of `model.modules()` and the like: calling one is a forward


class Noting(Expressions):
    """The part of the follower that notes what it cannot follow."""

    def note(self, callee: Value, node: ast.AST) -> None:
        """Note whether a call of this value is understood."""
        if node in self.flow.followed:
            return
        if callee.kind in ("def", "class"):
            self.flow.followed.add(node)
            return
        if callee.kind == "either":
            found = [self._why(one) for one in callee.parts]
            reason = found[0] if found and None not in found else None
        else:
            reason = self._why(callee)
        if reason is None:
            self.flow.followed.add(node)
        else:
            self.missed(node, *reason)

    def note_decorators(self, function: ast.AST, module: Module, name: str) -> None:
        """Note the decorators that are not of torch or Python: the function is followed without
        them.
        """
        for one in function.decorator_list if isinstance(function, _DEFINED) else ():
            value = self._in_module(module, one.func if isinstance(one, ast.Call) else one)
            if value.kind == "def" or (
                value.kind == "name" and outside(self.project, str(value.home))
            ):
                self.missed(
                    one,
                    DECORATED,
                    f"decorator: {name} was followed without it",
                    f"@{ast.unparse(one)[:60]}",
                )

    def _why(self, callee: Value) -> tuple[str, str] | None:
        """(kind, reason) why this value cannot be followed when it is called."""
        if callee.kind == "name":
            return outside(self.project, str(callee.home))
        if callee.kind == "attr" and callee.owner is not None:
            return self._of_library(callee.owner)
        if callee.kind in ("made", "object"):
            return None if self.is_module(callee) else self._of_library(callee)
        if callee.kind == "free":
            return UNKNOWN, "a parameter of a function that no visible code calls"
        if callee.kind == "item" and callee.name not in _MODULES:
            if any(self.is_module(holder) for holder in holders(callee)):
                return None
            return self._of_library(callee) or (UNKNOWN, "taken from a collection at run time")
        if callee.kind == "unknown":
            return UNKNOWN, "the sources do not show what is called"
        return None

    def _of_library(self, value: Value) -> tuple[str, str] | None:
        """`outside` of the library that made a value, or that its class inherits from."""
        for _ in range(20):
            if self.is_module(value):
                return None
            if value.kind == "name":
                return outside(self.project, str(value.home))
            event = value.event if value.kind == "made" else None
            if event is not None and not event.op and event.on is not None:
                value = event.on
            elif event is not None:
                home = self.external.get(event.op)
                return (
                    None
                    if home is None or is_optimizer(event.op)
                    else outside(self.project, str(home.home))
                )
            elif value.kind in ("attr", "item") and value.owner is not None:
                value = value.owner
            elif value.kind == "object":
                bases = (
                    outside(self.project, str(base.home)) for base in self.strange_bases(value.cls)
                )
                return next((reason for reason in bases if reason is not None), None)
            else:
                return None
        return None

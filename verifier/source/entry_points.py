"""Where following begins: at a script's first line, then at each function that this does not come
to.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Hashable

from .calls import INLINED
from .events import Event, Flow, is_distributed
from .follow import BUDGET, Follower
from .project import ClassInfo, Module, Project
from .values import Value, choices

_Known = dict[Hashable, tuple[list[Value], Value] | None]
_HOLD = ("list", "tuple", "dict", "either")
_LEAD = (
    *_HOLD,
    "const",
    "name",
    "file",
    "def",
    "class",
    "object",
)  # values that decide where a call leads


def follow(
    project: Project, kind: type[Follower] | None = None, followed: Collection[ast.AST] = ()
) -> list[Flow]:
    """The traces of a script: of its first line to its last, and of each function that this does
    not come to.

    `followed`: functions that need no flow of their own, since another script calls them. The trace
    of a function that does nothing distributed is a sketch, unless a `kind` of follower is chosen.
    """
    module = project.script
    if module is None:
        return []
    follower = (kind or Follower)(project, True, BUDGET)
    follower.start(module)
    traces, met = [follower.flow], follower.met
    known: _Known = {}
    for value in _entries(module):
        if value.node in met or value.node in followed:
            continue
        again: Follower = (sketch := Sketch(project, known))
        if kind is not None or sketch.comes_to_distributed(module, value):
            again = (kind or Follower)(project, False, BUDGET // 10)
            again.entry(module, value)
        met |= again.met
        traces.append(again.flow)
    return traces


def _entries(module: Module) -> list[Value]:
    """The functions and methods of a module."""
    found = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(Value("def", node.name, node=node, home=(module, None)))
        elif isinstance(node, ast.ClassDef):
            info = ClassInfo(node, module)
            found += [info.method(name, info) for name in info.methods if name != "__init__"]
    return found


class _Reached(Exception):
    """Something distributed is called."""


class Sketch(Follower):
    """A walk up to the first distributed call.

    Each function is followed once for each kind of arguments: `known` has those of one script, with
    the arguments as the call left them and the result; None for those that come to a distributed
    call.
    """

    def __init__(self, project: Project, known: _Known) -> None:
        super().__init__(project, False, BUDGET // 10)
        self.known, self.loading = known, False
        # the outermost place in the stack on which the result depends: a call that was not followed
        # again
        self.cut = 0

    def comes_to_distributed(self, module: Module, function: Value) -> bool:
        """Follow one function with parameters that are not known."""
        try:
            self.entry(module, function)
        except _Reached:
            return True
        return self.flow.distributed

    def load(self, module: Module) -> None:
        saved, self.loading = (
            self.loading,
            True,
        )  # a module that is half loaded would be of no use to the next walk
        super().load(module)
        self.loading = saved

    def emit(
        self,
        op: str,
        node: ast.AST,
        method: str = "",
        on: Value | None = None,
        args: list[Value] | None = None,
    ) -> Event:
        self._check(op, method)
        return super().emit(op, node, method, on, args)

    def _method(self, event: Event) -> Value:
        self._check("", event.method)
        return super()._method(event)

    def _check(self, op: str, method: str) -> None:
        if is_distributed(op, method) and not self.loading:
            raise _Reached

    def call_function(
        self, value: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        function, place = value.node, len(self.stack)
        if function in self.stack or place >= INLINED:
            self.cut = min(self.cut, self.stack.index(function) if function in self.stack else -1)
        if self.loading or function is None or function in self.stack or value.home[1] is not None:
            return super().call_function(value, args, kwargs, node)
        given = [
            *([value.const] if isinstance(value.const, Value) else []),
            *args,
            *kwargs.values(),
        ]
        key = (function, tuple(kwargs), *map(_kind, given))
        if key not in self.known:
            return self._follow_anew(key, given, value, args, kwargs, node)
        known = self.known[key]
        if known is None:
            raise _Reached
        self.met.add(function)
        self.flow.followed.add(function)
        for before, now in zip(known[0], given, strict=True):
            for old, new in zip(choices(before), choices(now), strict=False):
                if old is not new:
                    new.attrs = {**old.attrs, **new.attrs}
                    new.parts += old.parts[len(new.parts) :]
        return known[1]

    def _follow_anew(
        self,
        key: Hashable,
        given: list[Value],
        value: Value,
        args: list[Value],
        kwargs: dict[str, Value],
        node: ast.AST,
    ) -> Value:
        place = len(self.stack)
        outer, self.cut = self.cut, place
        try:
            result = super().call_function(value, args, kwargs, node)
        except _Reached:
            self.known[key] = None
            raise
        if self.cut >= place and self.budget >= 0:
            self.known[key] = (given, result)
        self.cut = min(outer, self.cut)
        return result


def _kind(value: Value, depth: int = 0) -> Hashable:
    """What of an argument decides where the calls of a function lead."""
    if value.kind == "const":
        return type(value.const), value.const
    home = value.home[1] if value.kind == "def" else None  # the names that an inner function reads
    own = (
        value.kind,
        value.name,
        value.node if value.kind in ("def", "class") else value.cls and value.cls.node,
        home,
    )
    partial = (
        value.kind == "made"
        and value.event is not None
        and any(one.kind == "def" for one in value.event.args)
    )
    if depth == 2:
        return own
    held = tuple(
        (name, _kind(one, depth + 1)) for name, one in value.attrs.items() if one.kind in _LEAD
    )
    inside = value.parts[:8] if partial or value.kind in _HOLD or value.kind == "object" else ()
    bound = [value.const] if isinstance(value.const, Value) else []
    return own, held, tuple(_kind(one, depth + 1) for one in (*bound, *inside))

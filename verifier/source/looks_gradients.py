"""Queries on the sources that several detectors on gradients use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .events import Event, Flow
from .looks import is_const, text, trains


def never_on(flow: Flow, method: str, what: str) -> Iterator[tuple[str, Event]]:
    """A switch that every call in the project turns off: a message that ends in `what`, and the first call."""
    if not trains(flow):
        return
    calls = flow.methods(method)
    off = [e for e in calls if is_const(e.arg(0, ""), False) and not e.kwargs and e.on is not None]
    elsewhere = sum(_mentions(m.tree, method) for m in flow.project.modules if method in m.source)
    if off and len(off) == len(calls) and elsewhere == len({id(e.node) for e in off}):
        yield f"{text(off[0].node)} is never followed by a call that turns it on again: {what}", off[0]


def _mentions(tree: ast.AST, name: str) -> int:
    """How often a name or a text stands in a source."""
    return sum(name in (getattr(node, "attr", None), getattr(node, "value", None)) for node in ast.walk(tree))

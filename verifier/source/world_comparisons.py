"""Comparisons of the number of ranks with constants. Pure functions on syntax trees."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .bound_names import Names, is_world

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def world_comparisons(nodes: Iterable[ast.AST], names: Names) -> Iterator[ast.Compare]:
    """Those of the number of ranks, or of its remainder and the like, with a constant."""
    for node in nodes:
        if isinstance(node, ast.Compare) and outcomes(node, names, [1]):
            yield node


def outcomes(test: ast.expr, names: Names, sizes: Iterable[int]) -> set[bool]:
    """Whether a condition holds on so many ranks; empty if it reads anything else."""
    if not any(is_world(node, names) for node in ast.walk(test)):
        return set()
    try:
        return {bool(_value(test, names, size)) for size in sizes}
    except (ValueError, ZeroDivisionError):
        return set()


def _value(node: ast.expr, names: Names, world: int) -> Any:
    """Raises ValueError where it depends on more than the number of ranks."""
    if is_world(node, names):
        return world
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, names, world)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, names, world), _value(right, names, world))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, names, world), _value(right, names, world))
    raise ValueError

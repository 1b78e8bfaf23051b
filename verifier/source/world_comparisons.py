"""Expressions of the number of ranks and constants whose choice may change with it: comparisons,
`world // 8`, `min(world, 8)`. Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

from .bound_names import Names, is_world, name_or_callee

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
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CHOOSE: dict[str, Callable[[list[Any]], Any]] = {"min": min, "max": max}
_SIZES = range(1, 1025)  # that a launch may have


def fixed_choices(
    nodes: Iterable[ast.AST], names: Names, sizes: Collection[int]
) -> Iterator[tuple[ast.expr, str]]:
    """(expression, its value in words) of those that came out in one way on so many ranks, and
    would in another one on others; of nested ones the outermost. Where `min` or `max` also take
    what is not known here, the value is "".
    """
    inner: set[ast.AST] = set()
    for node in nodes:  # as ast.walk yields them: outer ones before inner ones
        if node in inner or not isinstance(node, ast.Compare | ast.BinOp | ast.Call):
            continue
        found = {_choice(node, names, size) for size in sizes}
        if len(found) == 1 and None not in found and _changes(node, names, found):
            inner |= {*ast.walk(node)}
            yield node, found.pop() or ""
        elif found == {None} and _chooses_by_ranks(node, names):
            inner |= {*ast.walk(node)}
            yield node, ""


def _chooses_by_ranks(node: ast.expr, names: Names) -> bool:
    """Whether `min` or `max` is given what depends on the number of ranks."""
    chooses = isinstance(node, ast.Call) and _chooser(node) is not None
    return chooses and any(is_world(one, names) for one in ast.walk(node))


def outcomes(test: ast.expr, names: Names, sizes: Iterable[int]) -> set[bool]:
    """Whether a condition holds on so many ranks; empty if it reads anything else."""
    if not any(is_world(node, names) for node in ast.walk(test)):
        return set()
    try:
        return {bool(_value(test, names, size)) for size in sizes}
    except (ValueError, ZeroDivisionError):
        return set()


def _changes(node: ast.expr, names: Names, found: set[str | None]) -> bool:
    return any(_choice(node, names, size) not in {*found, None} for size in _SIZES)


def _choice(node: ast.expr, names: Names, world: int) -> str | None:
    """What an expression chooses on so many ranks; None where it makes no choice by them."""
    if not any(is_world(one, names) for one in ast.walk(node)):
        return None
    try:
        match node:
            case ast.Compare() | ast.BinOp(op=ast.FloorDiv() | ast.Mod()):
                return str(_value(node, names, world))
            case ast.Call(args=args) if (choose := _chooser(node)) is not None:
                values = [_value(one, names, world) for one in args]
                return ast.unparse(args[values.index(choose(values))])
    except (ValueError, ZeroDivisionError):
        pass
    return None


def _chooser(node: ast.Call) -> Callable[[list[Any]], Any] | None:
    """`min` or `max` of several arguments."""
    several = len(node.args) > 1 and not node.keywords
    return (
        _CHOOSE.get(name_or_callee(node)) if several and isinstance(node.func, ast.Name) else None
    )


def _value(node: ast.expr, names: Names, world: int) -> Any:
    """Raises ValueError where it depends on more than the number of ranks."""
    if is_world(node, names):
        return world
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, names, world)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, names, world), _value(right, names, world))
        case ast.Compare(left=left, ops=ops, comparators=rest) if {*map(type, ops)} <= {
            *_OPERATORS
        }:
            values = pairwise(_value(one, names, world) for one in (left, *rest))
            return all(_OPERATORS[type(op)](*pair) for op, pair in zip(ops, values, strict=True))
        case ast.Call(args=args) if (choose := _chooser(node)) is not None:
            return choose([_value(one, names, world) for one in args])
    raise ValueError

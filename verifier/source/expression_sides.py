"""The sides of expressions: what `a if c else b`, `and`, `or` and `a < b < c` evaluate or leave.

Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

# first line, first column, last line, column behind it; columns count bytes, as those of ast do
Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class Choice:
    """An expression of which `first` is always evaluated, and each of `sides` perhaps."""

    whole: ast.expr
    first: ast.expr
    sides: tuple[ast.expr, ...]


def choices(nodes: Iterable[ast.AST]) -> Iterator[Choice]:
    """The expressions among `nodes` that have sides."""
    for node in nodes:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                yield Choice(node, test, (body, orelse))
            case ast.BoolOp(values=[first, *rest]):
                yield Choice(node, first, tuple(rest))
            case ast.Compare(left=left, comparators=[_, *rest]) if rest:
                yield Choice(node, left, tuple(rest))


def span(node: ast.expr) -> Span:
    """Where an expression stands."""
    return (
        node.lineno,
        node.col_offset,
        node.end_lineno or node.lineno,
        node.end_col_offset or node.col_offset,
    )


def entries(code: CodeType, wanted: Iterable[Span]) -> dict[Span, dict[int, int]]:
    """For each of the expressions that this code evaluates: {offset of an instruction with which
    its evaluation begins: the line of that instruction}.
    """
    found: dict[Span, dict[int, int]] = {}
    wanted = list(wanted)
    inside: list[Span] = []
    for number, (line, last, start, end) in enumerate(code.co_positions()):
        if line is None or last is None or start is None or end is None:
            continue
        before, inside = inside, []
        for one in wanted:
            if one[:2] <= (line, start) and (last, end) <= one[2:]:
                inside.append(one)
                if one not in before:
                    found.setdefault(one, {})[2 * number] = line
    return found

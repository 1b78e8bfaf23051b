"""Statements in and behind the training loop that were not reached, from the lines that were.

Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVES = (ast.Raise, ast.Pass, ast.Continue, ast.Break, ast.Return, ast.Global, ast.Nonlocal)
_SAYS = (
    "print",
    "exit",
    "log",
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "write",
    "set_postfix",
)

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(frozen=True)
class Block:
    """Statements beside each other: `first` to `last` line; `under`: the line of the statement that
    they belong to, 0 for none.
    """

    first: int
    last: int
    under: int = 0


def blocks(
    tree: ast.Module, lines: Collection[int], entered: Collection[int], active: Collection[int]
) -> Iterator[tuple[Block, bool]]:
    """(block, whether it was reached) of what belongs to the training: the statements in loops and
    branches, and behind the loop.

    `lines`: the lines of the file that were reached, `entered`: since the training began; a
    function that has any of these belongs to it. `active`: the lines on the stack of the first
    optimizer step: their functions belong to it from the outermost loop on. Blocks that only raise,
    leave or print are left out, and so are the handlers of errors.
    """
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, _SCOPES[:2]))]:
        own = {line for line in active if _innermost(tree, line) is scope}
        if own:
            yield from _in(scope.body, lines, 0, min(_start(scope, line) for line in own))
        elif not isinstance(scope, ast.Module) and any(
            _innermost(tree, line) is scope for line in entered
        ):
            yield from _in(scope.body, lines, 0, 0)


def _in(
    body: Sequence[ast.stmt], lines: Collection[int], under: int, start: int
) -> Iterator[tuple[Block, bool]]:
    """The blocks of a list of statements, from line `start` on: consecutive statements that were
    reached, or were not, are one.
    """
    rest = [stmt for stmt in body if _end(stmt) >= start and _counts(stmt)]
    for reached, together in groupby(rest, lambda stmt: _reached(stmt, lines)):
        group = list(together)
        for stmt in group if reached else ():
            for part in _parts(stmt):
                yield from _in(part, lines, stmt.lineno, start)
        if not all(_is_trivial(stmt) for stmt in group) and not isinstance(group[-1], ast.Raise):
            yield Block(group[0].lineno, _end(group[-1]), under), reached


def _parts(stmt: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements within a statement, without the handlers of errors and without other
    functions.
    """
    if isinstance(stmt, _SCOPES):
        return []
    if isinstance(stmt, ast.Match):
        return [case.body for case in stmt.cases]
    return [part for name in ("body", "orelse", "finalbody") if (part := getattr(stmt, name, None))]


def _reached(stmt: ast.stmt, lines: Collection[int]) -> bool:
    """Whether any line of a statement was: of a compound one its header, or any statement in it."""
    decorators = getattr(stmt, "decorator_list", [])
    first = min([stmt.lineno, *(one.lineno for one in decorators)])
    if isinstance(stmt, _SCOPES):
        return any(line in lines for line in range(first, stmt.body[0].lineno))
    return any(line in lines for line in range(first, _end(stmt) + 1))


def _is_trivial(stmt: ast.stmt) -> bool:
    """Whether nothing of the training happens in a statement: it leaves, or writes a line for
    people.
    """
    if isinstance(stmt, (*_LEAVES, *_SCOPES, ast.Assert)):
        return True
    if isinstance(stmt, ast.If | ast.With):
        return all(_is_trivial(one) for part in _parts(stmt) for one in part)
    if not isinstance(stmt, ast.Expr) or not isinstance(stmt.value, ast.Call):
        return False
    name = ast.unparse(stmt.value.func).rpartition(".")[2]
    return any(name == word or name.startswith(f"{word}_") for word in _SAYS)


def _counts(stmt: ast.stmt) -> bool:
    """Whether a line event can tell: none is given for docstrings and declarations."""
    return not isinstance(stmt, ast.Global | ast.Nonlocal) and not (
        isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)
    )


def _innermost(tree: ast.Module, line: int) -> Scope:
    """The function that a line is in; the module for its top level."""
    found: Scope = tree
    for node in ast.walk(tree):  # breadth first: an inner function comes after the outer one
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[
            0
        ].lineno <= line <= _end(node):
            found = node
    return found


def _start(scope: Scope, line: int) -> int:
    """The first line of the outermost loop of a function around a line, else the line."""
    loops = [
        node
        for node in ast.walk(scope)
        if isinstance(node, _LOOPS) and node.lineno <= line <= _end(node)
    ]
    return min((node.lineno for node in loops), default=line)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno

"""Statements in loops and branches that were not reached, from the lines that were.

Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

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


@dataclass(frozen=True)
class Block:
    """Statements beside each other: `first` to `last` line; `under`: the line of the statement that
    they belong to, 0 for none.

    `body`: these statements; `within`: the statement that decides whether they run: the one that
    they belong to, or one before them that leaves; `function`: the name of the function that they
    are in. `returns`: they only return what they compute.
    """

    first: int
    last: int
    under: int = 0
    returns: bool = False
    body: tuple[ast.stmt, ...] = ()
    within: ast.stmt | None = None
    function: str = ""


def blocks(tree: ast.Module, lines: Collection[int]) -> Iterator[tuple[Block, bool]]:
    """(block, whether it was reached) of the statements of functions that were entered, and of the
    module's own.

    `lines`: the lines of the file that were reached. Blocks that only raise, leave or print are
    left out, and so are the handlers of errors.
    """
    for scope in (tree, *functions(tree)):
        own = range(scope.body[0].lineno, _end(scope.body[-1]) + 1) if scope.body else ()
        if any(line in lines for line in own):
            name = "" if isinstance(scope, ast.Module) else scope.name
            yield from _in(scope.body, lines, None, name)


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _in(
    body: Sequence[ast.stmt], lines: Collection[int], within: ast.stmt | None, function: str
) -> Iterator[tuple[Block, bool]]:
    """The blocks of a list of statements: consecutive statements that were reached, or were not,
    are one.
    """
    rest = filter(_counts, body)
    under, decides = within.lineno if within is not None else 0, within
    for reached, together in groupby(rest, lambda stmt: _reached(stmt, lines)):
        group = list(together)
        for stmt in group if reached else ():
            for part in parts_of(stmt):
                yield from _in(part, lines, stmt, function)
        returns = all(map(is_trivial, group))
        if not isinstance(group[-1], ast.Raise) and (not returns or any(map(_computes, group))):
            first, last = group[0].lineno, _end(group[-1])
            yield Block(first, last, under, returns, tuple(group), decides, function), reached
        decides = group[-1] if reached and isinstance(group[-1], ast.If) else within


def parts_of(stmt: ast.stmt) -> list[list[ast.stmt]]:
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


def is_trivial(stmt: ast.stmt) -> bool:
    """Whether nothing of the training happens in a statement: it leaves, or writes a line for
    people.
    """
    if isinstance(stmt, (*_LEAVES, *_SCOPES, ast.Assert)):
        return True
    if isinstance(stmt, ast.If | ast.With):
        return all(is_trivial(one) for part in parts_of(stmt) for one in part)
    if not isinstance(stmt, ast.Expr) or not isinstance(stmt.value, ast.Call):
        return False
    name = ast.unparse(stmt.value.func).rpartition(".")[2]
    return any(name == word or name.startswith(f"{word}_") for word in _SAYS)


def _counts(stmt: ast.stmt) -> bool:
    """Whether a line event shows it: none is given for docstrings and declarations."""
    return not isinstance(stmt, ast.Global | ast.Nonlocal) and not (
        isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)
    )


def _computes(stmt: ast.stmt) -> bool:
    """Whether a statement returns more than a value that is there."""
    if isinstance(stmt, ast.If | ast.With):
        return any(_computes(one) for part in parts_of(stmt) for one in part)
    return isinstance(stmt, ast.Return) and stmt.value is not None and not is_there(stmt.value)


def is_there(node: ast.expr) -> bool:
    """Whether an expression computes nothing: a name, a constant, a part of such, or some of
    them.
    """
    return not any(
        isinstance(one, ast.Call | ast.BinOp | ast.Await | ast.comprehension | ast.IfExp)
        for one in ast.walk(node)
    )


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno

"""Questions about syntax trees that several analyses of the sources ask."""

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from ..evidence import Sources

Loop = ast.For | ast.While


@lru_cache(maxsize=1 << 14)
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a tree as `ast.walk` gives them, kept: many questions are asked of the same
    trees.
    """
    return tuple(ast.walk(tree))


def functions_of(sources: Sources) -> Iterator[ast.FunctionDef]:
    """Every function of the project's own files."""
    return (function for file in sources.project for function in functions(sources.tree(file)))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Every function of a tree."""
    return (node for node in walk(tree) if isinstance(node, ast.FunctionDef))


def loops(tree: ast.AST) -> Iterator[Loop]:
    """Every loop of a tree."""
    return (node for node in walk(tree) if isinstance(node, Loop))


def called(node: ast.AST) -> set[str]:
    """The last names of what a tree calls: `step` of `optimizer.step()`."""
    return {last_name(n.func) for n in walk(node) if isinstance(n, ast.Call)}


def last_name(node: ast.AST) -> str:
    """`step` of `optimizer.step`, `print` of `print`; "" of what has no name."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def names_read(node: ast.AST | None) -> set[str]:
    """The variables that a tree reads."""
    names = (n for n in walk(node) if isinstance(n, ast.Name)) if node is not None else ()
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


def names_set(statements: Iterable[ast.stmt]) -> set[str]:
    """The last names of what assignments set: `best` of `best, at = found`, and of
    `self.best = x`.
    """
    targets = (
        target
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    return {last_name(part) for target in targets for part in ast.walk(target)} - {""}


def assigned_at(tree: ast.AST, function: str, name: str) -> list[int]:
    """The lines of a function (of the whole tree, where it has none of this name) that assign a
    variable, in order.
    """
    around: list[ast.AST] = [one for one in functions(tree) if one.name == function]
    return sorted(
        node.lineno
        for one in around or [tree]
        for node in walk(one)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
    )

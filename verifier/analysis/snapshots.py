"""Which variables of the sources are snapshots: kept for later, while training goes on."""

import ast
from functools import lru_cache

from ..evidence import Sources
from .state import assigned_in
from .syntax import called, functions, loops, names_read

_TRAINS = frozenset({"backward", "step"})


def snapshots(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of what is kept under a comparison, or assigned in a loop before a step and read after it."""
    trees = [sources.tree(file) for file in sources.project]
    training = _TRAINS.union(*(_training_functions(tree) for tree in trees))
    return kept_under_a_comparison(sources) | {one for tree in trees for one in _over_training(tree, training)}


@lru_cache(maxsize=256)
def _training_functions(tree: ast.Module) -> frozenset[str]:
    return frozenset(function.name for function in functions(tree) if called(function) & _TRAINS)


@lru_cache(maxsize=256)
def _over_training(tree: ast.Module, training: frozenset[str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for scope, loop in ((function, loop) for function in functions(tree) for loop in loops(function)):
        trains = [bool(called(statement) & training) for statement in loop.body]
        for i, first in enumerate(loop.body):
            names = {t.id for t in getattr(first, "targets", ()) if isinstance(t, ast.Name)}
            if names and any(trains[i + 1 :]):
                for later in loop.body[trains.index(True, i + 1) + 1 :]:
                    found |= {(scope.name, name) for name in names & names_read(later)}
    return found


def kept_under_a_comparison(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of what is assigned under a comparison by size, as a best value is, and read outside of that branch."""
    return {one for file in sources.project for one in _kept_in(sources.tree(file))}


@lru_cache(maxsize=256)
def _kept_in(tree: ast.Module) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)]
    # `self` stands for any object
    read = [(n.lineno, n.id if isinstance(n, ast.Name) else f"self.{n.attr}") for n in loads]
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            continue
        name = scope.name if isinstance(scope, ast.FunctionDef) else ""
        for branch in (n for n in ast.walk(scope) if isinstance(n, ast.If) and _by_size(n.test)):
            end = branch.end_lineno or branch.lineno
            for expression in assigned_in(branch):
                if any(text == expression and not branch.lineno <= line <= end for line, text in read):
                    found.add(("" if expression.startswith("self.") else name, expression))
    return found


def _by_size(test: ast.expr) -> bool:
    compares = (n for n in ast.walk(test) if isinstance(n, ast.Compare))
    return any(isinstance(n.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE) for n in compares)

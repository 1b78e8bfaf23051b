"""Which variables of the sources are snapshots: kept for later, while training goes on."""

import ast
from functools import lru_cache

from ..evidence import Sources
from .state import assigned_in

_TRAINS = frozenset({"backward", "step"})


def snapshots(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of what is kept under a comparison, or assigned in a loop before a step and read after it."""
    trees = [sources.tree(file) for file in sources.project]
    training = _TRAINS.union(*(_training_functions(tree) for tree in trees))
    return kept_under_a_comparison(sources) | {one for tree in trees for one in _over_training(tree, training)}


@lru_cache(maxsize=256)
def _training_functions(tree: ast.Module) -> frozenset[str]:
    return frozenset(f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and _calls(f) & _TRAINS)


@lru_cache(maxsize=256)
def _over_training(tree: ast.Module, training: frozenset[str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for scope in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for loop in (n for n in ast.walk(scope) if isinstance(n, ast.For | ast.While)):
            trains = [bool(_calls(statement) & training) for statement in loop.body]
            for i, first in enumerate(loop.body):
                names = {t.id for t in getattr(first, "targets", ()) if isinstance(t, ast.Name)}
                if not names or not any(trains[i + 1 :]):
                    continue
                for later in loop.body[trains.index(True, i + 1) + 1 :]:
                    read = {n.id for n in ast.walk(later) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
                    found |= {(scope.name, name) for name in names & read}
    return found


def _calls(node: ast.AST) -> set[str]:
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}


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
    return any(
        isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE) for n in ast.walk(test)
    )

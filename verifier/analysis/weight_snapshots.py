"""Which variables of the sources are snapshots: kept for later, while training goes on."""

import ast
from collections.abc import Iterator
from functools import lru_cache

from ..evidence import Sources
from .decisive_names import assigned_in
from .syntax import called, functions, loops, names_read, walk

# The calls that change weights: what is kept before one and read after it must be a copy.
_TRAINS = frozenset({"backward", "step"})


def snapshots(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of what is kept under a comparison, or assigned in a loop before a
    step and read after it.
    """
    trees = [sources.tree(file) for file in sources.project]
    training = _TRAINS.union(*(_training_functions(tree) for tree in trees))
    return kept_under_a_comparison(sources) | {
        one for tree in trees for one in _over_training(tree, training)
    }


@lru_cache(maxsize=256)
def _training_functions(tree: ast.Module) -> frozenset[str]:
    return frozenset(function.name for function in functions(tree) if called(function) & _TRAINS)


@lru_cache(maxsize=256)
def _over_training(tree: ast.Module, training: frozenset[str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for scope, loop in (
        (function, loop) for function in functions(tree) for loop in loops(function)
    ):
        trains = [bool(called(statement) & training) for statement in loop.body]
        for i, first in enumerate(loop.body):
            # A variable that is set before a step of the loop and read after it is a snapshot (exam
            # round 3, missed: two snapshots that alias the weights).
            names = {t.id for t in getattr(first, "targets", ()) if isinstance(t, ast.Name)}
            if names and any(trains[i + 1 :]):
                for later in loop.body[trains.index(True, i + 1) + 1 :]:
                    found |= {(scope.name, name) for name in names & names_read(later)}
    return found


def kept_under_a_comparison(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of what is assigned under a comparison by size, as a best value is,
    and read outside of that branch.
    """
    return {one for file in sources.project for one in _kept_in(sources.tree(file))}


@lru_cache(maxsize=256)
def _kept_in(tree: ast.Module) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    attributes = [
        n for n in walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    ]
    read = [(n.lineno, f"self.{n.attr}") for n in attributes]  # `self` stands for any object
    for body in [tree.body, *(function.body for function in functions(tree))]:
        read += [(n.lineno, n.id) for n in _from_before(body, set())]
    for scope in walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            continue
        name = scope.name if isinstance(scope, ast.FunctionDef) else ""
        for branch in (n for n in walk(scope) if isinstance(n, ast.If) and _by_size(n.test)):
            end = branch.end_lineno or branch.lineno
            for expression in assigned_in(branch):
                if any(
                    text == expression and not branch.lineno <= line <= end for line, text in read
                ):
                    found.add(("" if expression.startswith("self.") else name, expression))
    return found


# A state dict in a variable that is read only where it was just assigned is no snapshot (exam r5
# p_09_partial_window twin: `main.m`).
def _from_before(body: list[ast.stmt], own: set[str]) -> Iterator[ast.Name]:
    """The reads of variables that may hold what an earlier iteration, or a branch, has given them.

    `own`: those that do not.
    """
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        inner = [
            part
            for name in ("body", "orelse", "finalbody", "handlers")
            for part in getattr(statement, name, [])
        ]
        inside = {id(n) for part in inner for n in walk(part)}
        nodes = [n for n in walk(statement) if isinstance(n, ast.Name)]
        yield from (
            n
            for n in nodes
            if isinstance(n.ctx, ast.Load) and id(n) not in inside and n.id not in own
        )
        for name in ("body", "orelse", "finalbody"):
            first = set() if isinstance(statement, ast.For | ast.While) else set(own)
            # The variable of a loop is new in each iteration: the same name in another loop is no
            # snapshot (test_the_variable_of_another_loop_is_no_snapshot (round 12)).
            if isinstance(statement, ast.For) and name == "body":
                first = {n.id for n in walk(statement.target) if isinstance(n, ast.Name)}
            yield from _from_before(getattr(statement, name, []), first)
        for handler in getattr(statement, "handlers", ()):
            yield from _from_before(handler.body, set(own))
        stored = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
        own = own - stored if inner else own | stored


def appended(sources: Sources) -> set[tuple[str, str]]:
    """(function, expression) of the attributes to which methods append, and that are read
    elsewhere: windows and histories.
    """
    return {one for file in sources.project for one in _appended_in(sources.tree(file))}


@lru_cache(maxsize=256)
def _appended_in(tree: ast.Module) -> set[tuple[str, str]]:
    calls = [
        n.func for n in walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    lists = [
        f.value
        for f in calls
        # Windows and histories of weights are filled by append (exam round 5, missed: a window of
        # snapshots that alias the weights).
        if f.attr in ("append", "appendleft") and isinstance(f.value, ast.Attribute)
    ]
    loads = [n for n in walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    others = {n.attr for n in loads if all(n is not one for one in lists)}
    return {("", f"self.{one.attr}") for one in lists if one.attr in others}


def _by_size(test: ast.expr) -> bool:
    compares = (n for n in walk(test) if isinstance(n, ast.Compare))
    # The best value is kept under a comparison by size; an `==` is a step or a mode.
    return any(isinstance(n.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE) for n in compares)

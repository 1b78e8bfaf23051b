"""Buffers that ranks keep for themselves in training, and make equal before each use."""

import ast
from collections.abc import Iterator

from ..evidence import Evidence, Sources
from ..tolerances import SAME_ON_RANKS
from ..trace import Run
from ..trace.events import BuffersRead
from .state import apart, attribute
from .syntax import called, functions_of, walk

# What torch's norms with running statistics write in training, and read in evaluation only.
_RUNNING = {"running_mean", "running_var"}


def equal_where_read(evidence: Evidence, path: str) -> bool:
    """Whether a buffer of a model is only written in training, and was equal on all ranks whenever
    an evaluation, or the state of the model, has read it.
    """
    run, sources = evidence.trained, evidence.sources
    if not _equal(run, path, saved=False) or _read_in_training(sources, attribute(path)):
        return False
    names = {name for file in sources.project for name in called(sources.tree(file))}
    # A model that is saved after the last evaluation has the buffers of one rank.
    saves = any("state_dict" in name for name in names)
    return not saves or _equal(run, path, saved=True)


def _equal(run: Run, path: str, saved: bool) -> bool:
    """Whether there were reads, and all ranks have read the same."""
    reads = [
        [
            record.values[path]
            for record in trace.of(BuffersRead)
            if record.saved == saved and path in record.values
        ]
        for trace in run.traces
    ]
    if not all(reads) or len({len(own) for own in reads}) > 1:
        return False
    same = (apart(own[0], one) <= SAME_ON_RANKS for own in zip(*reads, strict=True) for one in own)
    return all(same)


def _read_in_training(sources: Sources, name: str) -> bool:
    """Whether a function may read an attribute while its module is in training mode."""
    bodies = [function.body for function in functions_of(sources)]
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for file in sources.project:
        top = sources.tree(file).body
        bodies.append([stmt for stmt in top if not isinstance(stmt, definitions)])
    parts = [part for body in bodies for part in body]
    if not any(_named(part, name) for part in parts):
        return name not in _RUNNING
    return any(_reads(part, name) for body in bodies for part in _trained(body))


def _trained(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The simple parts of a body that may run in training mode."""
    for stmt in body:
        if isinstance(stmt, ast.With):
            yield from stmt.items
            yield from _trained(stmt.body)
        elif isinstance(stmt, ast.If):
            yield stmt.test
            # `if self.training:` and `if not self.training:`
            negated = isinstance(stmt.test, ast.UnaryOp) and isinstance(stmt.test.op, ast.Not)
            test = stmt.test.operand if isinstance(stmt.test, ast.UnaryOp) else stmt.test
            mode = isinstance(test, ast.Attribute) and test.attr == "training"
            if not (mode and negated):
                yield from _trained(stmt.body)
            if not mode or negated:
                yield from _trained(stmt.orelse)
            if mode and not negated and isinstance(stmt.body[-1], ast.Return):
                return
        else:
            yield stmt


def _reads(part: ast.AST, name: str) -> bool:
    """Whether a part reads an attribute, other than to write it anew in place."""
    match part:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr=own), attr=method), args=given
            )
        ) if own == name and method.endswith("_"):
            return any(_reads(argument, name) for argument in given)
        case ast.AugAssign(target=ast.Attribute(attr=own), value=value) if own == name:
            return _reads(value, name)
    return any(isinstance(n.ctx, ast.Load) for n in _named(part, name))


def _named(part: ast.AST, name: str) -> list[ast.Attribute]:
    """Where a part names an attribute."""
    return [n for n in walk(part) if isinstance(n, ast.Attribute) and n.attr == name]

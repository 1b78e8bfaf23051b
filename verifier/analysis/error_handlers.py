"""Which statement of a function catches an error that was raised at a line of it."""

import ast
import math
from dataclasses import dataclass

from ..evidence import Sources
from ..trace.events import Place
from .syntax import called, functions_of, last_name, walk
from .wording import cut

_BROAD = {"Exception", "BaseException"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Handler:
    """The statement that catches an error: its line and text.

    `names`: whether it names the class of the error, or a base other than Exception; `leaves`:
    whether it leaves its loop or function.
    """

    line: int
    text: str
    names: bool = False
    leaves: bool = False


def handler_of(sources: Sources, at: Place, classes: list[str]) -> Handler | None:
    """What catches an error of these classes in the function of a line; None if nothing does.

    A context manager of the project may do so, where nothing else does.
    """
    around = [node for node in walk(sources.tree(at.file)) if _spans(node, at.line)]
    inside: list[ast.AST] = []
    for node in reversed(around):  # innermost first
        if isinstance(node, _SCOPES):
            break
        inside.append(node)
    for find in (_catching, _manager):
        for node in inside:
            if (found := find(sources, at, node, classes)) is not None:
                return found
    return None


def _catching(sources: Sources, at: Place, node: ast.AST, classes: list[str]) -> Handler | None:
    if isinstance(node, ast.With):
        return _suppressing(sources, at, node, classes)
    if not isinstance(node, ast.Try | ast.TryStar):
        return None
    in_body = any(_spans(one, at.line) for one in node.body)
    handler = next((one for one in node.handlers if _fits(one, classes)), None)
    # one that raises again at its end only cleans up
    if in_body and handler is not None and not isinstance(handler.body[-1], ast.Raise):
        text = _head(sources, at, handler.lineno)
        leaves = _leaving(handler.body) is not None
        return Handler(handler.lineno, text, _exact(_caught_by(handler)), leaves)
    leaving = _leaving(node.finalbody)
    if leaving is None or leaving.lineno <= at.line:
        return None
    text = f"finally: {_head(sources, at, leaving.lineno)}"
    return Handler(leaving.lineno, text, leaves=True)


def _suppressing(sources: Sources, at: Place, node: ast.With, classes: list[str]) -> Handler | None:
    """`with contextlib.suppress(...)`."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    for call in (one for one in calls if last_name(one.func) == "suppress"):
        names = {last_name(one) for one in call.args}
        if not names.isdisjoint(classes):
            return Handler(node.lineno, _head(sources, at, node.lineno), _exact(names))
    return None


def _manager(sources: Sources, at: Place, node: ast.AST, classes: list[str]) -> Handler | None:
    """A context manager of the project."""
    if not isinstance(node, ast.With):
        return None
    trees = (sources.tree(file) for file in sources.project)
    kinds = (one for tree in trees for one in walk(tree) if isinstance(one, ast.ClassDef))
    own = {one.name for one in functions_of(sources)} | {one.name for one in kinds}
    used = {name for item in node.items for name in called(item.context_expr)}
    return Handler(node.lineno, _head(sources, at, node.lineno)) if used & own else None


def _fits(handler: ast.ExceptHandler, classes: list[str]) -> bool:
    names = _caught_by(handler)
    return not names or not names.isdisjoint(classes)


def _caught_by(handler: ast.ExceptHandler) -> set[str]:
    """The names of the classes that a handler catches; none: all."""
    kind = handler.type
    if kind is None:
        return set()
    return {last_name(one) for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])}


def _exact(names: set[str]) -> bool:
    return bool(names) and names.isdisjoint(_BROAD)


def _leaving(body: list[ast.stmt]) -> ast.stmt | None:
    """The first statement of a body that leaves its loop or function."""
    for one in body:
        if isinstance(one, ast.Break | ast.Return):
            return one
        if isinstance(one, (*_SCOPES, *_LOOPS)):
            continue
        for name in ("body", "orelse", "finalbody"):
            if (found := _leaving(getattr(one, name, None) or [])) is not None:
                return found
    return None


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", math.inf) <= line <= (getattr(node, "end_lineno", None) or 0)


def _head(sources: Sources, at: Place, line: int) -> str:
    return cut(sources.line(at.file, line).rstrip(":"), 60)

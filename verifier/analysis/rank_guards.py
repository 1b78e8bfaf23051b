"""What surrounds a line of a source: rank guards, branches that skip it, its loop.

Only syntax trees are read.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from ..evidence import Sources
from .syntax import last_name, walk

# Names by which scripts ask for a rank (`is_main_process`, `master`); flags set from them count too
# (`_on_rank`).
_RANK = re.compile(r"(?i)rank|main_process|is_main|master|process_zero|coordinator|chief|primary")
# Steps, epochs and settings are the same on all ranks: a branch on them alone skips no rank.
_COMMON = re.compile(r"(?i)step|epoch|args|cfg|config|max_|every|world|iter")
# Words for values that each rank has of its own samples; they win over the common ones (`loss` in
# `step > 9 and loss < best`).
_LOCAL = re.compile(
    r"(?i)rank|loss|norm|grad|nan|inf\b|finite|overflow|best|patience|numel|len\(|empty|size|shape|skip|valid|time|exists|"
    r"\bany|\ball"
)
_LEAVES = (ast.Continue, ast.Break, ast.Return)  # without an error
_JUMPS = (*_LEAVES, ast.Raise)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Branch:
    """A statement that some ranks may take and others not: its line, and its condition as text."""

    line: int
    text: str


def rank_guard(sources: Sources, file: str, line: int) -> Branch | None:
    """The condition on the rank under which `line` runs: around it, or an early exit before it in
    the same block.
    """
    tree = sources.tree(file)
    path = _path(tree, line)
    for node in reversed(path):
        if (
            isinstance(node, ast.If | ast.While)
            and _in_branch(node, line)
            and _on_rank(tree, node.test)
        ):
            return _branch(node)
        if isinstance(node, ast.IfExp) and _on_rank(tree, node.test):
            return _branch(node)
        if isinstance(node, ast.BoolOp) and _on_rank(tree, node.values[0]):
            return Branch(node.lineno, ast.unparse(node.values[0]))
        if isinstance(node, ast.FunctionDef) and any(
            _RANK.search(ast.unparse(d)) for d in node.decorator_list
        ):
            return Branch(node.lineno, f"@{ast.unparse(node.decorator_list[0])}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node is tree:
            break
    return next(
        (_branch(node) for node in _leaving_before(path, line) if _on_rank(tree, node.test)), None
    )


def skipping_branch(sources: Sources, file: str, before: int | None, missed: int) -> Branch | None:
    """A branch through which a rank that has passed line `before` misses line `missed`, both in one
    function.

    That is an `if`, not on the rank, around `missed` alone; an exception handler that does not
    re-raise; a jump between the two. `before` is None where the function was entered in between.
    """
    tree = sources.tree(file)
    path = _path(tree, missed)
    for node in reversed(path):
        if isinstance(node, _FUNCTIONS):
            break
        new = before is None or not _spans(node, before)
        if isinstance(node, ast.If) and new and _in_branch(node, missed) and _is_local(node.test):
            return _branch(node)
        handler = node if isinstance(node, ast.ExceptHandler) and new else None
        if isinstance(node, ast.Try) and any(_spans(n, missed) for n in node.body):
            handler = _swallowing(node)
        if handler is not None:
            return Branch(handler.lineno, sources.line(file, handler.lineno).rstrip(":"))
        if isinstance(node, _LOOPS) and before is not None and _spans(node, before):
            break
    function = next((n for n in reversed(path) if isinstance(n, _FUNCTIONS)), tree)
    for node in _ifs(function, _JUMPS):
        if (
            not _spans(node, missed)
            and _is_local(node.test)
            and _between(node.lineno, before, missed, path)
        ):
            return _branch(node)
    return None


def _between(line: int, before: int | None, missed: int, path: list[ast.AST]) -> bool:
    """Whether a line is passed on the way from `before` to `missed`, which may be in the next
    iteration of a loop.
    """
    if before is None or before < missed:
        return (before or 0) < line <= missed
    loop = next((n for n in reversed(path) if isinstance(n, _LOOPS) and _spans(n, before)), None)
    return loop is not None and _spans(loop, line) and (line > before or line <= missed)


def _swallowing(node: ast.Try) -> ast.ExceptHandler | None:
    """A handler that does not raise again."""
    quiet = (h for h in node.handlers if not isinstance(h.body[-1], ast.Raise))
    return next(
        # Ctrl-C reaches all ranks: a handler of it swallows no error of one rank.
        (h for h in quiet if not (h.type and "KeyboardInterrupt" in ast.unparse(h.type))),
        None,
    )


def leaving_branch(sources: Sources, file: str, line: int) -> Branch | None:
    """An `if` in the loop around `line` that leaves the loop."""
    loop = _loop(_path(sources.tree(file), line))
    ifs = _ifs(loop, (ast.Break, ast.Return)) if loop is not None else ()
    return next((_branch(node) for node in ifs if _is_local(node.test)), None)


def loop_of(sources: Sources, file: str, line: int) -> tuple[int, int] | None:
    """First and last line of the innermost loop around `line` in its function."""
    loop = _loop(_path(sources.tree(file), line))
    return (loop.lineno, loop.end_lineno or loop.lineno) if loop is not None else None


def loop_is_plain(sources: Sources, file: str, line: int) -> tuple[int, int] | None:
    """The lines of the loop whose head is at `line`, if it takes every item: no break, return or
    raise, no slice of it.
    """
    for node in walk(sources.tree(file)):
        if isinstance(node, ast.For) and node.lineno <= line <= node.iter.end_lineno:  # type: ignore[operator]
            # A loop that is cut to a number of batches does not end with the rank's own loader.
            cut = any(name in ast.unparse(node.iter) for name in ("islice", "zip", "range"))
            leaves = _holds(node, (ast.Break, ast.Return, ast.Raise))
            return None if leaves or cut else (node.lineno, node.end_lineno or node.lineno)
    return None


def _path(tree: ast.Module, line: int) -> list[ast.AST]:
    """The nodes that span `line`, outermost first, beginning with the module."""
    found: list[ast.AST] = [tree]
    queue: list[ast.AST] = [tree]
    while queue:
        for child in ast.iter_child_nodes(queue.pop()):
            if not hasattr(child, "lineno") or _spans(child, line):
                queue.append(child)
                if hasattr(child, "lineno"):
                    found.append(child)
    return found


def _spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        first = node.decorator_list[0].lineno
    return first <= line <= last


def _in_branch(node: ast.If | ast.While, line: int) -> bool:
    return any(_spans(n, line) for n in (*node.body, *node.orelse))


def _holds(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(n, kinds) for n in walk(node))


def _ifs(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.If]:
    """The `if` statements in a node that hold a statement of these kinds."""
    return (n for n in walk(node) if isinstance(n, ast.If) and _holds(n, kinds))


def _on_rank(tree: ast.Module, test: ast.AST) -> bool:
    """Whether a condition depends on the rank, directly or through a name that was set from it."""
    if _RANK.search(ast.unparse(test)):
        return True
    names = {last_name(n) for n in walk(test) if isinstance(n, ast.Name | ast.Attribute)}
    conditions = ast.Compare | ast.BoolOp | ast.UnaryOp
    sets = (
        n
        for n in walk(tree)
        if isinstance(n, ast.Assign) and names & set(map(last_name, n.targets))
    )
    return any(
        isinstance(n.value, conditions) and _RANK.search(ast.unparse(n.value)) is not None
        for n in sets
    )


def _is_local(test: ast.AST) -> bool:
    """Whether a condition may differ between ranks: not one on steps, epochs and settings alone."""
    text = ast.unparse(test)
    return _LOCAL.search(text) is not None or _COMMON.search(text) is None


def _branch(node: ast.If | ast.IfExp | ast.While) -> Branch:
    return Branch(node.lineno, f"if {ast.unparse(node.test)}")


def _leaving_before(path: list[ast.AST], line: int) -> Iterator[ast.If]:
    """The `if` statements above `line`, in the blocks around it within its function, that end in a
    jump.
    """
    for node in reversed(path):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for item in block if isinstance(block, list) else ():
                if (
                    isinstance(item, ast.If)
                    and (item.end_lineno or 0) < line
                    and isinstance(item.body[-1], _LEAVES)
                ):
                    yield item
        if isinstance(node, _FUNCTIONS):
            return


def _loop(path: list[ast.AST]) -> ast.For | ast.While | ast.AsyncFor | None:
    """The innermost loop of a path, within its function."""
    inside = takewhile(lambda node: not isinstance(node, _FUNCTIONS), reversed(path))
    return next((node for node in inside if isinstance(node, _LOOPS)), None)

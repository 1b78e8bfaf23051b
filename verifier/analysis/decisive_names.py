"""Variables of a training loop that decide something later, and those that only measure time."""

import ast
import re
from functools import lru_cache

from .syntax import functions, last_name, walk

# A resumed run measures its times anew: sums of what a clock gives are no state (the scaffold's own
# metrics) (the scaffold's own metrics (test_a_timer_is_no_state)).
_CLOCKS = {
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "time",
    "time_ns",
}
# Calls by which a branch only writes to a log: a number that decides no more than that is not
# state.
_QUIET = re.compile(
    r"^(print|format|len|float|int|round|str|min|max|sum|mean|append|write|flush|item|time|perf_counter|monotonic|"
    r"log|info|debug|warning|set_postfix|set_description|update_bar|add_scalar|get_rank|join|items|values|keys)$"
)


@lru_cache(maxsize=256)
def carried(tree: ast.Module) -> set[tuple[str, str]]:
    """(function, expression) of what is assigned from itself, or under a condition on itself, and
    decides something.

    Names of a module and attributes of `self` stand for all functions, which "" says.
    """
    outside = ast.Module(
        [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)], []
    )
    found = {("", expression) for expression in _carried_in(outside)}
    for function in functions(tree):
        own = _carried_in(function)
        found |= {(function.name, expression) for expression in own}
        found |= {("", expression) for expression in own if expression.startswith("self.")}
    return found


def _carried_in(scope: ast.AST) -> set[str]:
    from_itself: set[str] = set()
    deciding: set[str] = set()
    for node in walk(scope):
        if isinstance(node, ast.AugAssign):
            from_itself.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            targets = {ast.unparse(target) for target in node.targets}
            read = read_in(node.value)
            from_itself |= targets & read
            # A value that is only set once, the first time, decides nothing: a resume may find it
            # again. best = min(best, value); `first = value if first is None else first` decides
            # nothing
            value = node.value
            first_time = isinstance(value, ast.IfExp) and _asks_for_none(value.test)
            for one in (
                (value.body, value.orelse)
                if isinstance(value, ast.IfExp) and first_time
                else (value,)
            ):
                if isinstance(one, ast.Call | ast.IfExp):
                    deciding |= targets & read_in(one)
        elif isinstance(node, ast.If | ast.While):
            read, assigned = read_in(node.test), assigned_in(node)
            from_itself |= read & assigned
            if read & assigned or _acts(node):
                deciding |= read
    return from_itself & deciding


@lru_cache(maxsize=256)
def timed(tree: ast.Module) -> set[tuple[str, str]]:
    """(function, expression) of times and sums of times: they measure, and a resumed run measures
    anew.
    """
    known: set[tuple[str, str]] = set()
    for _ in range(2):  # of what a later line assigns, too
        for scope in (tree, *functions(tree)):
            name = scope.name if isinstance(scope, ast.FunctionDef) else ""
            for node in (n for n in walk(scope) if isinstance(n, ast.Assign | ast.AugAssign)):
                if _is_time(node.value, name, known):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    known |= {_scoped(target, name) for target in targets}
    return known


def _scoped(node: ast.AST, function: str) -> tuple[str, str]:
    text = ast.unparse(node)
    return "" if text.startswith("self.") else function, text


def _is_time(value: ast.expr, function: str, known: set[tuple[str, str]]) -> bool:
    """Whether an expression reads a clock, or is a sum or multiple of what has read it."""
    if isinstance(value, ast.BinOp):
        return _is_time(value.left, function, known) or _is_time(value.right, function, known)
    if isinstance(value, ast.Call):
        return last_name(value.func) in _CLOCKS
    return isinstance(value, ast.Name | ast.Attribute) and _scoped(value, function) in known


def _asks_for_none(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)


def read_in(node: ast.AST) -> set[str]:
    return {
        ast.unparse(n)
        for n in walk(node)
        if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)
    }


def assigned_in(node: ast.If | ast.While) -> set[str]:
    found = set()
    for inner in (n for part in (*node.body, *node.orelse) for n in walk(part)):
        if isinstance(inner, ast.Assign):
            found |= {
                ast.unparse(one)
                for target in inner.targets
                for one in getattr(target, "elts", [target])
            }
        elif isinstance(inner, ast.AugAssign):
            found.add(ast.unparse(inner.target))
    return found


def _acts(node: ast.If | ast.While) -> bool:
    """Whether a branch does more than write to a log."""
    inside = [n for part in (*node.body, *node.orelse) for n in walk(part)]
    leaves = any(isinstance(n, ast.Break | ast.Return | ast.Raise) for n in inside)
    return leaves or any(
        isinstance(n, ast.Call) and not _QUIET.match(last_name(n.func)) for n in inside
    )

"""How far the loops around a line of the project have come, from the values of a frame's variables.

Runs no code of the script: an expression that may is not evaluated.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any

from ..trace.events import LoopAt
from .frames import tree_of

_Loop = ast.For | ast.While
_BARS = ("tqdm", "track")  # show the progress of what they are given
_NUMBERS = (int, float)
_PLAIN: dict[str, Callable[..., Any]] = {
    "int": lambda number: int(number),
    "min": lambda *numbers: min(numbers),
    "max": lambda *numbers: max(numbers),
}
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class _Unknown(Exception):
    """A value that the verifier cannot know without running code of the script."""


def loops_at(frame: FrameType, line: int) -> list[LoopAt]:
    """The loops around a line of a frame's function, outermost first."""
    code = frame.f_code
    found = _loops(code.co_filename, code.co_firstlineno, line)
    if not found:
        return []
    names = {**frame.f_globals, **frame.f_locals}
    return [_position(loop, code.co_filename, names) for loop in found]


@lru_cache(maxsize=256)
def _loops(file: str, first: int, line: int) -> list[_Loop]:
    """The loops in whose head or body a line is, of the function that begins at line `first`."""
    loops = [node for node in tree_of(file) if isinstance(node, _Loop)]
    around = [one for one in loops if first <= one.lineno <= line <= _end(one)]
    return sorted(around, key=lambda one: one.lineno)


def _end(loop: _Loop) -> int:
    """The last line of a loop's body."""
    last = loop.body[-1]
    return last.end_lineno or last.lineno


def _position(loop: _Loop, file: str, names: Mapping[str, Any]) -> LoopAt:
    goes_on, total, done = None, None, None
    try:
        if not isinstance(loop, ast.While):
            total, done = _progress(loop.target, loop.iter, names)
        elif not isinstance(loop.test, ast.Constant):
            goes_on = bool(_number(loop.test, names))
    except _Unknown:
        pass
    if total is None and goes_on is None:  # `while True` ends by a break
        goes_on = _breaks_not(loop, names)
    first, last = loop.lineno, _end(loop)
    return LoopAt(file=file, line=first, last=last, goes_on=goes_on, total=total, done=done)


def _breaks_not(loop: _Loop, names: Mapping[str, Any]) -> bool | None:
    """Whether no `if` of a loop breaks it now; None if that is not known."""
    ifs = [one for one in ast.walk(loop) if isinstance(one, ast.If)]
    tests = [one.test for one in ifs if isinstance(one.body[-1], ast.Break)]
    try:
        return not any(_number(test, names) for test in tests) if tests else None
    except _Unknown:
        return None


def _progress(
    target: ast.expr, items: ast.expr, names: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """(how many iterations a loop has, how many are behind it)."""
    call = _name(items.func) if isinstance(items, ast.Call) else ""
    given = items.args if isinstance(items, ast.Call) else []
    if call in _BARS and given:
        return _progress(target, given[0], names)
    if call == "enumerate" and given and isinstance(target, ast.Tuple):
        start = _number(given[1], names) if len(given) > 1 else 0
        at = _number(target.elts[0], names)
        return _progress(target, given[0], names)[0], int(at - start)
    whole = _value(items, names)
    if isinstance(whole, range) and isinstance(target, ast.Name):
        now = names.get(target.id)
        return len(whole), whole.index(now) if type(now) is int and now in whole else None
    return _length(whole), None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of names, numbers and their attributes. Raises _Unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute):
        found = inspect.getattr_static(_value(node.value, names), node.attr, _Unknown)
        if found is _Unknown or inspect.isroutine(found) or hasattr(type(found), "__get__"):
            raise _Unknown
        return found
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, names), _value(node.slice, names))
    if isinstance(node, ast.BinOp):
        return _applied(node.op, node.left, node.right, names)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _applied(node.ops[0], node.left, node.comparators[0], names)
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join([bool(_number(one, names)) for one in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _number(node.operand, names)
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(_name(node.func), node.args, names)
    raise _Unknown


def _item(items: Any, key: Any) -> Any:
    if type(items) is dict and isinstance(key, str) and key in items:
        return items[key]
    raise _Unknown


def _called(name: str, given: Sequence[ast.expr], names: Mapping[str, Any]) -> Any:
    if name == "len" and len(given) == 1:
        return _length(_value(given[0], names))
    if name in ("range", *_PLAIN) and given:
        numbers = [_number(one, names) for one in given]
        if name in _PLAIN:
            return _PLAIN[name](*numbers)
        if all(isinstance(one, int) for one in numbers) and (len(numbers) < 3 or numbers[2]):
            return range(*numbers)
    raise _Unknown


def _applied(
    kind: ast.AST, left: ast.expr, right: ast.expr, names: Mapping[str, Any]
) -> int | float:
    a, b = _number(left, names), _number(right, names)
    if type(kind) not in _OPERATORS or (isinstance(kind, ast.FloorDiv) and not b):
        raise _Unknown
    result: int | float = _OPERATORS[type(kind)](a, b)
    return result


def _number(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """A number: to compare or to ask a tensor may run a collective."""
    value = _value(node, names)
    if not isinstance(value, _NUMBERS):
        raise _Unknown
    return value


def _length(value: Any) -> int:
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(value).__mro__}
    if isinstance(value, list | tuple | range | dict) and type(value).__module__ == "builtins":
        return len(value)
    # the length of an iterable data set is a guess, and to ask for it makes torch warn
    if "torch.DataLoader" in kinds and getattr(value, "_dataset_kind", 1) == 0:
        return len(value)
    raise _Unknown


def _name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))

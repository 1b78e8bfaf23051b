"""Code that a reviewer need not read where no run reached it: messages, guards, imports, defaults,
the choice of a device. Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from .bound_names import Names, kinds_in, name_or_callee
from .expression_sides import Choice
from .unreached_blocks import Block, is_there, is_trivial, parts_of

_MISSING_MODULE = ("ImportError", "ModuleNotFoundError")
# what a script does with a device beside computing on it
_DEVICE_CALLS = (
    *("device", "set_device", "current_device", "device_count", "init_process_group"),
    *("manual_seed", "manual_seed_all", "empty_cache", "synchronize", "is_available"),
    *("reset_peak_memory_stats", "max_memory_allocated", "get_device_name", "int", "getenv", "get"),
)
_ENDS = ("destroy_process_group", "barrier")
_NEVER_HERE = ("__name__", "TYPE_CHECKING")  # as a module; for type checkers
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DISTRIBUTED = ("dist.is_available", "distributed.is_available")


class Parents:
    """The nodes that hold others."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self._of = {child: node for node in nodes for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(node, what holds it), up to the innermost statement."""
        while not isinstance(node, ast.stmt) and node in self._of:
            yield node, self._of[node]
            node = self._of[node]

    def only_guards(self, node: ast.expr) -> bool:
        """Whether an expression stands in a text, a check or a message, or decides about such
        alone.
        """
        for inner, outer in self.above(node):
            if isinstance(outer, ast.JoinedStr):
                return True
            if isinstance(outer, ast.If) and inner is outer.test:
                return is_idle_statement(outer)
            if isinstance(outer, ast.Return):
                return False
            if isinstance(outer, ast.stmt):
                return is_idle_statement(outer)
        return False


def is_idle_statement(stmt: ast.stmt) -> bool:
    """Whether a statement writes, checks or imports only."""
    if isinstance(stmt, ast.Import | ast.ImportFrom):
        return True
    if isinstance(stmt, ast.If | ast.With):
        return all(is_idle_statement(one) for part in parts_of(stmt) for one in part)
    if isinstance(stmt, ast.Return):
        return stmt.value is None or is_there(stmt.value)
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        return is_trivial(stmt) or name_or_callee(stmt.value).startswith("warn")
    return is_trivial(stmt)


def only_ends(body: Iterable[ast.stmt]) -> bool:
    """Whether statements only take the ranks apart, at the end of a script."""
    for stmt in body:
        if isinstance(stmt, ast.If | ast.With):
            if not all(map(only_ends, parts_of(stmt))):
                return False
        elif not is_idle_statement(stmt) and not (
            isinstance(stmt, ast.Expr) and name_or_callee(stmt.value) in _ENDS
        ):
            return False
    return True


def is_idle(block: Block, names: Names) -> bool:
    """Whether statements that were not reached say nothing about the training."""
    if all(map(is_idle_statement, block.body)):
        return True
    match block.within:
        case ast.Try(handlers=handlers):
            caught = [one for h in handlers if h.type is not None for one in ast.walk(h.type)]
            return any(name_or_callee(one) in _MISSING_MODULE for one in caught)
        case ast.If(test=test):
            return (
                any(name_or_callee(one) in _NEVER_HERE for one in ast.walk(test))
                or (_asks_device(test, names) and all(map(_chooses_device, block.body)))
                or _asks_launch(test)
                or (_asks_none(test) and all(map(_fills_in, block.body)))
            )
    return False


def is_idle_side(
    choice: Choice, side: ast.expr, parents: Parents, names: Names, lines: Collection[int]
) -> bool:
    """Whether a side that was not evaluated says nothing about the training, or what its statement
    says already.
    """
    if parents.only_guards(choice.whole) or ast.unparse(side) in ("[]", "()", "{}", "''"):
        return True
    condition = False
    for inner, outer in parents.above(choice.whole):
        if isinstance(outer, ast.If | ast.While) and inner is outer.test:
            # its statements are found themselves
            if not any(line in lines for line in _lines(outer.body)):
                return True
            condition = True
        condition |= isinstance(outer, ast.comprehension) and inner in outer.ifs
        condition |= isinstance(outer, ast.IfExp) and inner is outer.test
    if isinstance(choice.whole, ast.IfExp):
        if _asks_device(choice.first, names) and _is_device(side):
            return True
        return _asks_none(choice.first) and is_there(side)
    truth = isinstance(side, ast.Compare) or (
        isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not)
    )
    default = isinstance(choice.whole, ast.BoolOp) and isinstance(choice.whole.op, ast.Or)
    # A name or a constant is what is there otherwise; a slice of data is chosen.
    default = default and not any(isinstance(one, ast.Slice) for one in ast.walk(side))
    return is_there(side) and (condition or truth or default)


def _lines(body: list[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _asks_none(test: ast.expr) -> bool:
    """Whether a condition asks if something is given at all."""
    match test:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asks_none(inner)
        case ast.BoolOp(values=parts):
            return all(map(_asks_none, parts))
        case ast.Call(func=ast.Name(id="isinstance" | "hasattr" | "callable")):
            return True
    return False


def _asks_launch(test: ast.expr) -> bool:
    """Whether a condition asks if there are ranks at all: then the other way has none."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asks_launch(inner)
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()]):
            return name in _LAUNCHED
        case ast.BoolOp(values=parts):
            return all(map(_asks_launch, parts))
    return name_or_callee(test) in ("is_initialized", "is_torchelastic_launched") or (
        isinstance(test, ast.Call) and ast.unparse(test.func).endswith(_DISTRIBUTED)
    )


def _asks_device(test: ast.expr, names: Names) -> bool:
    return "device" in kinds_in(test, names)


def _is_device(node: ast.expr) -> bool:
    """Whether an expression names a device, or what belongs to it, such as `rank % count()`."""
    parts = list(ast.walk(node))
    calls = [name_or_callee(one) for one in parts if isinstance(one, ast.Call)]
    computes = any(isinstance(one, ast.BinOp) for one in parts)
    return all(name in _DEVICE_CALLS for name in calls) and (bool(calls) or not computes)


def _chooses_device(stmt: ast.stmt) -> bool:
    match stmt:
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _is_device(value)
        case ast.Expr(value=ast.Call() as value):
            return _is_device(value)
    return is_idle_statement(stmt)


def _fills_in(stmt: ast.stmt) -> bool:
    """Whether a statement sets what is there already, as a default."""
    match stmt:
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return is_there(value)
    return is_idle_statement(stmt)

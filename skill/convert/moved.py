"""An optimizer that is built before the wrapper: its statement goes below that of the wrapper,
where nothing between them needs it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import libcst as cst

from .found import Construct, Found
from .nodes import text_of

Order = Callable[[cst.Module], cst.Module]


def move_optimizers(module: cst.Module, found: Found) -> tuple[list[Construct], Order]:
    """(the constructs that a move settles, what makes the moves in the edited module)."""
    wraps = [
        row
        for row in found.all()
        if row.row.startswith(("DistributedDataParallel", "FullyShardedDataParallel"))
    ]
    moves: dict[str, str] = {}
    moved = []
    for one in found.all():
        if one.row == "optimizer before the wrapper" and len(wraps) == 1:
            names = _names(found.source, one, wraps[0])
            if names is not None:
                moves[names[0]] = names[1]
                moved.append(one)
    return moved, lambda edited: edited.visit(_Mover(moves)) if moves else edited


def _names(source: str, optimizer: Construct, wrap: Construct) -> tuple[str, str] | None:
    """(target of the optimizer, target of the wrapper) of two assignments in one block, the second
    below the first.
    """
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        first = [
            n
            for n, one in enumerate(body)
            if isinstance(one, ast.Assign) and _holds(one, optimizer)
        ]
        second = [
            n for n, one in enumerate(body) if isinstance(one, ast.Assign) and _holds(one, wrap)
        ]
        if first and second and first[0] < second[0]:
            name, model = (ast.unparse(body[n].targets[0]) for n in (first[0], second[0]))
            between = "\n".join(ast.unparse(one) for one in body[first[0] + 1 : second[0] + 1])
            unique = sum(
                ast.unparse(t) == name
                for a in ast.walk(ast.parse(source))
                if isinstance(a, ast.Assign)
                for t in a.targets
            )
            return (
                (name, model)
                if name not in between and unique == 1 and model in ast.unparse(body[first[0]])
                else None
            )
    return None


def _holds(statement: ast.stmt, construct: Construct) -> bool:
    return any(
        getattr(node, "lineno", 0) == construct.event.line and isinstance(node, ast.Call)
        for node in ast.walk(statement)
    )


class _Mover(cst.CSTTransformer):
    def __init__(self, moves: dict[str, str]) -> None:
        super().__init__()
        self._moves = moves

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._ordered(list(updated_node.body)))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._ordered(list(updated_node.body)))

    def _ordered(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        for name, model in self._moves.items():
            at = {
                target: number
                for number, one in enumerate(body)
                if (target := _target(one)) in (name, model)
            }
            if len(at) == 2 and at[name] < at[model]:
                body.insert(at[model], body.pop(at[name]))
        return body


def _target(statement: cst.BaseStatement) -> str:
    """What a statement assigns to."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return ""
    return text_of(small.targets[0].target)

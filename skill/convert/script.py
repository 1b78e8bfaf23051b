"""The whole of a converted script: the edits, the function that shards, imports, and what is no
longer used.
"""

from __future__ import annotations

import re
from collections.abc import Container

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor
from libcst.metadata import MetadataWrapper

from ...verifier.errors import UserError
from . import wrapper
from .edits import Edits, comment
from .expressions import FILES, SETTLED
from .found import Construct, Converted, Found, todo
from .moved import move_optimizers
from .nodes import text_of

LONGEST = 100  # characters of an import
_STATES = ("state_dict", "load_state_dict")
_OLD = (
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.distributed.optim",
    "contextlib",
    "functools",
)
_LEFTOVERS = (
    "FullStateDictConfig",
    "FullOptimStateDictConfig",
    "ShardedStateDictConfig",
    "MixedPrecision",
    "functools.partial",
    "partial",
    "ModuleWrapPolicy",
    "CPUOffload",
)


def edited(found: Found) -> Converted:
    """The converted script. Raises UserError for one that libcst cannot read."""
    try:
        module = cst.parse_module(found.source)
    except cst.ParserSyntaxError as error:
        raise UserError(f"{found.path}:{error.raw_line}: {error.message}") from None
    edits = Edits(found)
    names = edits.names | _defined(found.source)
    ours = found.source.count("blocks") == found.source.count(".blocks")
    if names & {wrapper.NAME, "blocks"} and not ours:
        raise UserError(
            f"{found.path}: the names {wrapper.NAME} and blocks are for the functions that shard;"
            " rename yours"
        )
    moved, orders = move_optimizers(module, found)
    module = orders(MetadataWrapper(module).visit(edits))
    module = _without_leftovers(_with_helper(module, found, edits))
    _account_for_all(found, edits, moved)
    module = _with_imports(module, found, edits)
    todos = sorted(edits.todos, key=lambda one: one.line)
    return Converted(
        found.kind,
        _placed(module.code, edits),
        tuple(sorted(set(edits.done))),
        (*todos, *map(todo, found.elsewhere)),
    )


def _account_for_all(found: Found, edits: Edits, moved: Container[Construct]) -> None:
    """Settle or mark what no edit of one expression decides, and mark what none has handled."""
    for one in found.all():
        if one.row == "optimizer before the wrapper":
            (edits.settle if one in moved else edits.mark)(one)
    left = [one.construct.partition("(")[0].rpartition(".")[2] for one in edits.todos]
    states = any(name in _STATES for name in left)
    for one in found.all():
        if one.row in FILES:
            (edits.mark if states else edits.settle)(one)
    handled = {(one.line, one.construct) for one in edits.todos} | set(edits.done)
    for one in found.all():
        if (one.line, one.row) not in handled:
            edits.mark(one)


def _defined(source: str) -> set[str]:
    return set(re.findall(r"^\s*(?:def|class) (\w+)", source, re.MULTILINE))


def _with_helper(module: cst.Module, found: Found, edits: Edits) -> cst.Module:
    """With the functions that shard, below the imports."""
    if not edits.by_class and not edits.by_block:
        return module
    equal = any(row.row in SETTLED for row in found.all())
    text = wrapper.helper(found.kind, edits.by_class, edits.by_block, equal, found.source)
    added = cst.parse_module(text).body
    body = list(module.body)
    last = max((number for number, one in enumerate(body) if _is_import(one)), default=-1)
    spaced = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
    added = [one.with_changes(leading_lines=spaced) for one in added]
    following = body[last + 1 :]
    if following:
        lines = [line for line in getattr(following[0], "leading_lines", ()) if line.comment]
        following[0] = following[0].with_changes(leading_lines=[*spaced, *lines])
    return module.with_changes(body=[*body[: last + 1], *added, *following])


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Import | cst.ImportFrom
    )


def _with_imports(module: cst.Module, found: Found, edits: Edits) -> cst.Module:
    """With what the new calls need, without what only the old ones used."""
    context = CodemodContext()
    wanted = set(edits.imports)
    if edits.by_class or edits.by_block:
        wanted.add((wrapper.POLICY, "fully_shard"))
        if found.kind == "ddp":
            wanted.add(("torch.distributed.device_mesh", "init_device_mesh"))
    for name, thing in sorted(wanted):
        AddImportsVisitor.add_needed_import(context, name, thing or None)
    for statement in _imports(cst.parse_module(found.source)):
        if (
            isinstance(statement, cst.ImportFrom)
            and statement.module is not None
            and not isinstance(statement.names, cst.ImportStar)
        ):
            package = text_of(statement.module)
            if package.startswith(_OLD) and not statement.relative:
                for alias in statement.names:
                    asname = alias.evaluated_alias
                    RemoveImportsVisitor.remove_unused_import(
                        context, package, alias.evaluated_name, asname
                    )
        elif isinstance(statement, cst.Import):
            for alias in statement.names:
                if alias.evaluated_name.startswith(_OLD):
                    RemoveImportsVisitor.remove_unused_import(
                        context, alias.evaluated_name, None, alias.evaluated_alias
                    )
    module = AddImportsVisitor(context).transform_module(module)
    return (
        RemoveImportsVisitor(context)
        .transform_module(module)
        .visit(_Imports({name for name, _ in wanted}))
    )


class _Imports(cst.CSTTransformer):
    """Lays out the imports that were changed: in one line, or one name a line."""

    def __init__(self, changed: set[str]) -> None:
        super().__init__()
        self._changed = changed

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom:
        package = text_of(updated_node.module) if updated_node.module is not None else ""
        if package not in self._changed or isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        names = sorted(
            text_of(one.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for one in updated_node.names
        )
        line = f"from {package} import {', '.join(names)}"
        if len(line) > LONGEST:
            line = f"from {package} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        made = cst.ensure_type(cst.parse_statement(line), cst.SimpleStatementLine).body[0]
        return cst.ensure_type(made, cst.ImportFrom)


def _imports(module: cst.Module) -> list[cst.BaseSmallStatement]:
    return [
        small
        for one in module.body
        if isinstance(one, cst.SimpleStatementLine)
        for small in one.body
    ]


def _without_leftovers(module: cst.Module) -> cst.Module:
    """Without assignments of old configurations that nothing reads any more."""
    return module.visit(_Leftovers(module.code))


class _Leftovers(cst.CSTTransformer):
    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        small = updated_node.body[0]
        if (
            len(updated_node.body) != 1
            or not isinstance(small, cst.Assign)
            or not isinstance(small.value, cst.Call)
        ):
            return updated_node
        made = text_of(small.value.func)
        target = small.targets[0].target
        old = made in _LEFTOVERS or made.rpartition(".")[2] in _LEFTOVERS
        if (
            old
            and isinstance(target, cst.Name)
            and len(re.findall(rf"\b{target.value}\b", self._code)) == 1
        ):
            return cst.RemoveFromParent()
        return updated_node


def _placed(code: str, edits: Edits) -> str:
    """The text, with the marks that have no statement of their own above it."""
    found = [comment(one) for one in edits.todos if comment(one) not in code]
    if not found:
        return code
    lines = code.splitlines(keepends=True)
    first = next(
        (number for number, line in enumerate(lines) if re.match(r"(import|from) ", line)), 0
    )
    return "".join([*lines[:first], *(f"{one}\n" for one in found), *lines[first:]])

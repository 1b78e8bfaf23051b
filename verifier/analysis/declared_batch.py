"""The global batch that a script divides over its ranks, by its sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence import Sources
from ..source.bound_names import Names, assigned, bound_names, is_world, name_or_callee
from ..trace.events import Place

_BATCH = re.compile(r"(?i)(?!.*(micro|local|eval|val_|test|per_))\w*batch")
# A batch of an evaluation may be divided while each rank trains on its own.
_BESIDE = re.compile(r"(?i)eval|valid|test")
# Names of a number of ranks that no call of `get_world_size` shows to be one.
_RANKS = re.compile(
    r"(?i)world|devices|replicas|n_?gpus|num_(gpus|processes|ranks)|dp_(size|degree)"
)


@dataclass(frozen=True)
class DividedBatch:
    """A division of a batch by a number of ranks.

    `values`: what the sources and the command line give the batch, in its own unit.
    """

    name: str
    place: Place
    values: frozenset[int]


def divided_batches(sources: Sources, command: str) -> list[DividedBatch]:
    """The divisions of what is named a batch by what is a number of ranks."""
    trees = {file: sources.tree(file) for file in sources.project}
    names = bound_names(trees)
    return [
        DividedBatch(name, place, frozenset(_values(trees, name, command)))
        for file, tree in trees.items()
        for name, place in _divisions(tree, file, names[file])
    ]


def _divisions(tree: ast.Module, file: str, names: Names) -> Iterator[tuple[str, Place]]:
    for function in ast.walk(tree):
        inner = getattr(function, "name", "<module>")
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        if _BESIDE.search(inner):
            continue
        # a product in a quotient is a part of the same division
        found = {
            (name, node.lineno): None
            for node in _own(function)
            if isinstance(node, ast.BinOp) and (name := _divided(node, names))
        }
        for name, line in found:
            yield name, Place(file=file, line=line, function=inner, code="")


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def _divided(node: ast.BinOp, names: Names) -> str:
    """The name of a batch at the left of products and quotients, of which one divides by ranks."""
    left: ast.expr = node
    by_ranks = False
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.FloorDiv | ast.Div | ast.Mult):
        parts = ast.walk(left.right) if not isinstance(left.op, ast.Mult) else ()
        by_ranks = by_ranks or any(_is_ranks(part, names) for part in parts)
        left = left.left
    name = name_or_callee(left) if isinstance(left, ast.Name | ast.Attribute) else ""
    return name if by_ranks and _BATCH.match(name) else ""


def _is_ranks(node: ast.AST, names: Names) -> bool:
    match node:
        case ast.Name() | ast.Attribute() if _RANKS.search(name_or_callee(node)):
            return True
        case ast.Call(func=ast.Attribute(attr="size", value=on)):  # of a mesh, or of a dim of it
            return "mesh" in ast.unparse(on)
    return is_world(node, names)


def _values(trees: dict[str, ast.Module], name: str, command: str) -> Iterator[int]:
    """The whole numbers that a name of a setting is given."""
    spelled = re.escape(name).replace("_", "[-_]")
    for found in re.findall(rf"(?:^|[\s.]|--){spelled}[ =](\d+)", command):
        yield int(found)
    for tree in trees.values():
        for node in ast.walk(tree):
            for value in _given(node, name):
                if isinstance(value, ast.Constant) and type(value.value) is int:
                    yield value.value


def _given(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """What a node gives a setting: an assignment, a field, a keyword, an option's default."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = (pair for target in targets for pair in assigned(target, value))
            yield from (given for target, given in pairs if name_or_callee(target) == name)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            if name_or_callee(target) == name:
                yield value
        case ast.Call(args=args, keywords=words):
            long = (str(a.value) for a in args if isinstance(a, ast.Constant))
            if any(one[:2] == "--" and one[2:].replace("-", "_") == name for one in long):
                yield from (word.value for word in words if word.arg == "default")
            yield from (word.value for word in words if word.arg == name)
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args]
            defaults = [
                *zip(reversed(plain), reversed(node.defaults), strict=False),
                *zip(node.kwonlyargs, node.kw_defaults, strict=True),
            ]
            yield from (value for one, value in defaults if one.arg == name and value is not None)
        case ast.Dict(keys=keys, values=values):
            entries = zip(keys, values, strict=True)
            yield from (v for k, v in entries if isinstance(k, ast.Constant) and k.value == name)

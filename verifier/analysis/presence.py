"""Whether a script has anything of a kind: by what its sources name, and by what a run that completed has shown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from ..evidence import Sources
from ..trace import Run
from ..trace.events import Shard, Wrap


def unnamed(sources: Sources, *words: str) -> str:
    """Why a script has nothing that goes by one of these names; "" if it may: its sources name one, or are not known."""
    if not sources.project or not words or any(_names(sources, file, words) for file in sources.project):
        return ""
    return f"the sources name no {' or '.join(words)}"


def unsharded(run: Run) -> str:
    """Why a completed run has no sharded model; "" if it has one, or stopped before it may have come to it."""
    if not run.completed or not run.models or any(run.places(Shard)):
        return ""
    return "" if any(entries[0].sharded for entries in run.parameters.values()) else "no parameter is sharded"


def sharded_once(run: Run) -> str:
    """Why a completed run has no sharded module in another; "" if it may have."""
    return "fully_shard is called once" if len(list(run.places(Shard))) == 1 else ""


def meshes(run: Run) -> int:
    """How many meshes, by their shape, names and ranks, hold what rank 0 has of a run's parameters, or are given to `fully_shard`."""
    entries = [e[0] for e in run.parameters.values() if e[0].sharded and e[0].rank == 0]
    given = [wrap.mesh for wrap in run.places(Wrap) if wrap.mesh is not None]
    held = {(tuple(e.mesh), tuple(e.mesh_names), tuple(e.ranks)) for e in entries}
    return len(held | {(tuple(mesh.shape), tuple(mesh.names), tuple(mesh.ranks)) for mesh in given})


def _names(sources: Sources, file: str, words: tuple[str, ...]) -> bool:
    tree = sources.tree(file)
    unreadable = not tree.body and bool(sources.texts.get(file, "").strip())
    return unreadable or not _words(tree).isdisjoint(words)


@lru_cache(maxsize=256)
def _words(tree: ast.Module) -> frozenset[str]:
    """Every name, attribute, keyword, import and word of a string, but for docstrings."""
    return frozenset(word for node in ast.walk(tree) for word in _words_of(node))


def _words_of(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
            yield from re.findall(r"\w+", child.value)
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.keyword | ast.arg) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")

"""What a script sets in the environment before it imports torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ..evidence import Sources

# Read when torch is imported, so without effect in a rank that is forked from a process that has it
# already.
_READ_AT_IMPORT = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|ATEN|DNNL|TORCH|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO)_"
)


def before_torch(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, variable) of what the module-level code sets, before its first import of torch, for
    torch's import to read.
    """
    found: list[tuple[int, str]] = []
    for statement in tree.body:
        nodes = list(ast.walk(statement))
        modules = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        if any(module.partition(".")[0] == "torch" for module in modules):
            return found
        names = (name for node in nodes for name in _set(node))
        found += [(statement.lineno, name) for name in names if _READ_AT_IMPORT.match(name)]
    return []  # another module imports torch, at an unknown point


def _set(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _text(target.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "putenv" or (
            node.func.attr == "setdefault" and _is_environ(node.func.value)
        ):
            yield from (name for argument in node.args[:1] for name in _text(argument))
        elif node.func.attr == "update" and _is_environ(node.func.value):
            keys = [
                key
                for argument in node.args
                if isinstance(argument, ast.Dict)
                for key in argument.keys
            ]
            yield from (name for key in keys if key is not None for name in _text(key))
            yield from (word.arg for word in node.keywords if word.arg)


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def note(script: Path, sources: Sources) -> str:
    """A note on forked runs of this script for the report, or ""."""
    found = before_torch(sources.tree(str(script)))
    if not found:
        return ""
    line, _ = found[0]
    names = ", ".join(dict.fromkeys(name for _, name in found))
    return (
        f"{script.name}:{line} sets {names} before it imports torch, which forked ranks have"
        " already imported: no effect in these runs. Use `--launcher torchrun` for ranks in which"
        " it takes effect."
    )

"""Looking up a line in the sources, for rules that know what happened and not where. Reads files, runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LIMIT = 200


def project_files(script: Path) -> tuple[Path, ...]:
    """The script and the files of its own folder that it imports, directly or through one another; at most 200."""
    found, queue = [script], [script]
    while queue and len(found) < _LIMIT:
        for name in _imported(queue.pop()):
            base = script.parent.joinpath(*name.split("."))
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file() and path not in found:
                    found.append(path)
                    queue.append(path)
    return tuple(found)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)[1]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _tree(path: Path) -> tuple[str, ast.Module]:
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return "", ast.Module(body=[], type_ignores=[])


def find_local_norm(files: tuple[Path, ...]) -> dict[str, Any] | None:
    """The first statement of the project that takes a norm over the local part of gradients."""
    for path, function, node, text in _statements(files):
        local = "to_local()" in text or "_local_tensor" in text
        if local and any(word in text for word in ("norm", "pow(2)", "** 2", "**2", "square")):
            return {"file": str(path), "line": node.lineno, "function": function, "code": text.splitlines()[0].strip()}
    return None


def _statements(files: tuple[Path, ...]) -> Iterator[tuple[Path, str, ast.stmt, str]]:
    """Simple statements with their function and source text."""
    for path in files:
        source, tree = _tree(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        owners: list[tuple[str, list[ast.AST]]] = [(f.name, list(ast.walk(f))) for f in functions]
        for name, nodes in [*owners, ("<module>", list(tree.body))]:
            for node in nodes:
                if isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Expr | ast.AnnAssign):
                    yield path, name, node, ast.get_source_segment(source, node) or ""

"""Where a script's absolute imports are looked up: its own folder, `sys.path` as its source changes it, and its repository."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_UP = 12  # folders above a script
_FOLDERS = 20  # added by one source
_SAME = ("abspath", "realpath", "normpath", "str", "Path", "PurePath", "fspath", "resolve", "absolute", "as_posix")
_KNOWN = ("torch", "numpy", "tqdm", "builtins")
Names = dict[str, ast.expr]


def roots(script: Path) -> list[Path]:
    """The folders from which a script can import, besides those that its source adds: the nearest first."""
    found = [script.parent, package_root(script)]
    for folder in repositories(script):
        found += [folder, folder / "src"]
    return [folder for folder in dict.fromkeys(found) if folder == script.parent or folder.is_dir()]


def is_known(top: str) -> bool:
    """Whether a module is Python's own, or of a library whose calls the detectors understand or can ignore."""
    return top in sys.stdlib_module_names or top in _KNOWN


def package_root(script: Path) -> Path:
    """The folder above the outermost package that a file lies in: what `python -m` is started from."""
    above = script.parents[: _UP + 1]
    return next((folder for folder in above if not (folder / "__init__.py").is_file()), above[-1])


def repositories(script: Path) -> Iterator[Path]:
    """The projects around a file, the nearest first: folders with a build file, up to the checkout's root.

    Without a checkout only the nearest one counts.
    """
    above = script.parents[:_UP]
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), None)
    found = [folder for folder in above if any((folder / name).exists() for name in _MARKS)]
    yield from found[:1] if root is None else (folder for folder in found if folder in above[: root + 1])


def added(tree: ast.Module, file: Path) -> list[Path]:
    """The folders that a source adds to `sys.path`, as far as they follow from the source."""
    names: Names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, node.value)
    found: list[Path] = []
    for node in ast.walk(tree):
        for item in _given(node):
            text = _text(item, names, file, 0)
            if text:
                folder = Path(os.path.normpath(file.parent / text))
                found += [folder] if folder.is_dir() and folder not in found else []
    return found[:_FOLDERS]


def _given(node: ast.AST) -> list[ast.expr]:
    """What a statement or call adds to `sys.path`."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in ("sys.path.insert", "sys.path.append", "site.addsitedir"):
            return node.args[-1:]
        return _items(node.args[0]) if name == "sys.path.extend" and node.args else []
    if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "sys.path":
        return _items(node.value)
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("sys.path"):
        return _items(node.value)
    return []


def _items(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return _items(node.left) + _items(node.right)
    return node.elts if isinstance(node, ast.List | ast.Tuple) else []


def _text(node: ast.expr, names: Names, file: Path, depth: int) -> str | None:
    """The path that an expression gives, as text; None if that does not follow from the source."""
    if depth > 20:
        return None

    def inner(one: ast.expr) -> str | None:
        return _text(one, names, file, depth + 1)

    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return str(file) if node.id == "__file__" else inner(names[node.id]) if node.id in names else None
    if isinstance(node, ast.JoinedStr):
        return _joined([p.value if isinstance(p, ast.FormattedValue) else p for p in node.values], inner, "".join)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
        return _joined([node.left, node.right], inner, _path if isinstance(node.op, ast.Div) else "".join)
    if isinstance(node, ast.Attribute):
        base = inner(node.value) if node.attr == "parent" else None
        return os.path.dirname(base) if base else None  # noqa: PTH120
    if isinstance(node, ast.Subscript):
        return _parents(node, inner)
    return _called(node, inner) if isinstance(node, ast.Call) else None


def _called(node: ast.Call, inner: Callable[[ast.expr], str | None]) -> str | None:
    """The path that one of the functions of `os.path` or `pathlib` gives."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _SAME and isinstance(node.func, ast.Attribute) and not node.args:
        return inner(node.func.value)
    if name == "dirname" and len(node.args) == 1:
        base = inner(node.args[0])
        return os.path.dirname(base) if base else None  # noqa: PTH120
    if name == "joinpath" and isinstance(node.func, ast.Attribute):
        return _joined([node.func.value, *node.args], inner, _path)
    return _joined(node.args, inner, _path) if (name in _SAME or name == "join") and node.args else None


def _path(parts: list[str]) -> str:
    return os.path.join(*parts)  # noqa: PTH118


def _parents(node: ast.Subscript, inner: Callable[[ast.expr], str | None]) -> str | None:
    """`path.parents[n]`."""
    number = node.slice.value if isinstance(node.slice, ast.Constant) else None
    if not (isinstance(node.value, ast.Attribute) and node.value.attr == "parents" and isinstance(number, int)):
        return None
    base = inner(node.value.value)
    above = list(Path(base).parents) if base else []
    return str(above[number]) if 0 <= number < len(above) else None


def _joined(
    nodes: Sequence[ast.expr], inner: Callable[[ast.expr], str | None], join: Callable[[list[str]], str]
) -> str | None:
    parts = [inner(node) for node in nodes]
    return join([part for part in parts if part is not None]) if None not in parts else None

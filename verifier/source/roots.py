"""Where a script's absolute imports are looked up: its own folder, `sys.path` as its source changes
it, and its repository.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_UP = 12  # folders above a script
_FOLDERS = 20  # added by one source
_SAME = (
    "abspath",
    "realpath",
    "normpath",
    "str",
    "Path",
    "PurePath",
    "fspath",
    "resolve",
    "absolute",
    "as_posix",
)
_KNOWN = ("torch", "numpy", "tqdm", "builtins")
Names = dict[str, ast.expr]


def roots(script: Path) -> list[Path]:
    """The folders from which a script can import, besides those that its source adds: the nearest
    first.
    """
    found = [script.parent, package_root(script)]
    for folder in repositories(script):
        found += [folder, folder / "src"]
    return [folder for folder in dict.fromkeys(found) if folder == script.parent or folder.is_dir()]


def is_known(top: str) -> bool:
    """Whether a module is Python's own, or of a library whose calls the detectors understand or can
    ignore.
    """
    return top in sys.stdlib_module_names or top in _KNOWN


def package_root(script: Path) -> Path:
    """The folder above the outermost package that a file lies in: what `python -m` is started
    from.
    """
    above = script.parents[: _UP + 1]
    return next((folder for folder in above if not (folder / "__init__.py").is_file()), above[-1])


def repositories(script: Path) -> Iterator[Path]:
    """The projects around a file, the nearest first: folders with a build file, up to the
    checkout's root.

    Without a checkout only the nearest one counts.
    """
    above = script.parents[:_UP]
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), None)
    found = [folder for folder in above if any((folder / name).exists() for name in _MARKS)]
    yield from (
        found[:1] if root is None else (folder for folder in found if folder in above[: root + 1])
    )


def added(tree: ast.Module, file: Path) -> list[Path]:
    """The folders that a source adds to `sys.path`, as far as they follow from the source."""
    names: Names = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            names.setdefault(node.targets[0].id, node.value)
    found: list[Path] = []
    for node in ast.walk(tree):
        for item in _given(node):
            with suppress(LookupError):
                text = _text(item, names, str(file))
                folder = Path(os.path.normpath(file.parent / text))
                found += [folder] if text and folder.is_dir() and folder not in found else []
    return found[:_FOLDERS]


def _given(node: ast.AST) -> list[ast.expr]:
    """What a statement or call adds to `sys.path`."""
    match node:
        case ast.Call(func=function, args=[first, *_]):
            name = ast.unparse(function)
            if name == "sys.path.extend":
                return _items(first)
            return (
                node.args[-1:]
                if name in ("sys.path.insert", "sys.path.append", "site.addsitedir")
                else []
            )
        case ast.AugAssign(target=target, value=value) if ast.unparse(target) == "sys.path":
            return _items(value)
        case ast.Assign(targets=[target, *_], value=value) if ast.unparse(target).startswith(
            "sys.path"
        ):
            return _items(value)
    return []


def _items(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return _items(node.left) + _items(node.right)
    return node.elts if isinstance(node, ast.List | ast.Tuple) else []


def _text(node: ast.expr, names: Names, file: str, depth: int = 0) -> str:
    """The path that an expression gives, as text.

    Raises LookupError if that does not follow from the source.
    """

    def each(*parts: ast.expr) -> list[str]:
        return [_text(part, names, file, depth + 1) for part in parts]

    match node:
        case _ if depth > 20:
            raise LookupError
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id="__file__"):
            return file
        case ast.Name(id=name):
            return each(names[name])[0]
        case ast.FormattedValue(value=base):
            return each(base)[0]
        case ast.JoinedStr(values=parts):
            return "".join(each(*parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return "".join(each(left, right))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return os.path.join(*each(left, right))  # noqa: PTH118
        case ast.Attribute(value=base, attr="parent"):
            return os.path.dirname(*each(base))
        case ast.Subscript(
            value=ast.Attribute(value=base, attr="parents"), slice=ast.Constant(value=int(number))
        ):
            return str(Path(*each(base)).parents[number])
        case ast.Call(func=ast.Attribute(value=base, attr=name), args=[]) if name in _SAME:
            return each(base)[0]
        case ast.Call(func=ast.Attribute(value=base, attr="joinpath"), args=parts):
            return os.path.join(*each(base, *parts))  # noqa: PTH118
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[first, *parts]):
            if name == "dirname" and not parts:
                return os.path.dirname(*each(first))
            if name == "join" or name in _SAME:
                return os.path.join(*each(first, *parts))  # noqa: PTH118
    raise LookupError

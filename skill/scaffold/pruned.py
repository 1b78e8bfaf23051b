"""A template has every import, constant and function that one of its options needs; a project keeps
those that its code uses.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .literals import INDENT, LINE

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(eq=False)
class Part:
    """A statement at the top of a module: its comments and lines, and the blank lines before."""

    node: ast.stmt
    lines: list[str]
    gap: int
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    imports: list[ast.ImportFrom] = field(default_factory=list)  # those in functions, too

    def __post_init__(self) -> None:
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name):
                self.names.add(node.id)
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                self.imports.append(node)
        self.names.discard(self.defined() or "")  # what calls itself alone is not used

    def defined(self) -> str | None:
        """The function, class or constant that this statement defines."""
        if isinstance(self.node, DEFINITIONS):
            return self.node.name
        target = self.node.targets[0] if isinstance(self.node, ast.Assign) else None
        return target.id if isinstance(target, ast.Name) else None

    def keep_imports(self, used: set[str]) -> bool:
        """Drop the imports of other names; whether any is left."""
        if not isinstance(self.node, IMPORTS):
            return True
        names = self.node.names
        kept = [name for name in names if (name.asname or name.name.partition(".")[0]) in used]
        if kept and len(kept) < len(names):
            self.node.names = kept
            self.lines = _import(self.node)
        return bool(kept)


def pruned(files: Mapping[str, str]) -> dict[str, str]:
    """The files of a project; its Python without what nothing in it uses."""
    modules = {path: parts(text) for path, text in files.items() if path.endswith(".py")}
    while _drop_unused(modules):
        pass
    own = {path.removesuffix(".py") for path in modules}
    return {**files, **{path: _text(found, own) for path, found in modules.items()}}


def _drop_unused(modules: dict[str, list[Part]]) -> bool:
    before = sum(len(found) for found in modules.values())
    for path, found in modules.items():
        code = set().union(*(part.names for part in found))
        code -= {name for part in found if (name := part.defined())}
        modules[path] = _without(found, [part for part in found if part.keep_imports(code)])
    everything = [part for found in modules.values() for part in found]
    attributes = set().union(*(part.attributes for part in everything))
    for path, found in modules.items():
        if not path.startswith("tests/"):
            used = attributes | _imported(everything, path.removesuffix(".py"))
            used = used.union(*(part.names for part in found))
            kept = [p for p in found if (name := p.defined()) is None or name in used]
            modules[path] = _without(found, kept)
    return sum(len(found) for found in modules.values()) < before


def _imported(everything: list[Part], module: str) -> set[str]:
    """The names that are imported from a module."""
    nodes = [node for part in everything for node in part.imports if node.module == module]
    return {name.name for node in nodes for name in node.names}


def _without(found: list[Part], kept: list[Part]) -> list[Part]:
    """The parts that are kept, with the blank lines that they need then."""
    if len(found) == len(kept):
        return found
    here, gap = {*kept}, 2
    for part in found:
        gap = min(gap, part.gap)
        if part in here:
            part.gap, gap = gap, 2
    return kept


def parts(text: str) -> list[Part]:
    tree, lines = ast.parse(text), text.splitlines()
    found, end = [], 0
    for node in tree.body:
        start = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1
        before = lines[end:start]
        gap = next((n for n, line in enumerate(before) if line.strip()), len(before))
        end = node.end_lineno or node.lineno
        found.append(Part(node, lines[start - len(before) + gap : end], gap))
    return found


def _text(found: list[Part], own: set[str]) -> str:
    lines = [*found[0].lines]
    for last, part in itertools.pairwise(found):
        lines += [""] * _gap(last, part, own) + part.lines
    return "\n".join(lines) + "\n"


def _gap(last: Part, part: Part, own: set[str]) -> int:
    """Blank lines between two statements, as `ruff` has them."""
    if isinstance(last.node, DEFINITIONS) or isinstance(part.node, DEFINITIONS):
        return 2
    if isinstance(last.node, IMPORTS) and isinstance(part.node, IMPORTS):
        return int(_section(last.node, own) != _section(part.node, own))
    return 1 if isinstance(last.node, (*IMPORTS, ast.Expr)) else min(part.gap, 1)


def _section(node: ast.Import | ast.ImportFrom, own: set[str]) -> int:
    """Imports of the standard library stand first, those of the project last."""
    module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    top = (module or "").partition(".")[0]
    return 2 if top in own else int(top not in sys.stdlib_module_names)


def _import(node: ast.Import | ast.ImportFrom) -> list[str]:
    line = ast.unparse(node)
    if len(line) <= LINE:
        return [line]
    opening, _, names = line.partition(" import ")
    return [f"{opening} import (", *_indented(names.split(", ")), ")"]


def _indented(names: list[str]) -> Iterator[str]:
    return (f"{' ' * INDENT}{name}," for name in names)

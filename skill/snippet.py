"""Cutting a piece out of rendered modules: some functions or classes, with all that they use, as
one block of code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Definition = tuple[str, str]  # (module, name)
Import = tuple[str, str, str]  # (module, name, name that it is given here or "")


@dataclass(frozen=True)
class Module:
    """A rendered module: its top-level definitions and imports, by the name that they bind."""

    name: str
    lines: list[str]
    definitions: dict[str, ast.stmt]
    # name -> (module it is imported from, "" for `import x`; alias)
    imports: dict[str, tuple[str, ast.alias]]


def extract(files: Mapping[str, str], wanted: Sequence[Definition]) -> str:
    """The wanted definitions of `files` (path -> text) and all of these modules that they use, in
    the order of `files`.

    Imports come first, then constants, then the rest. Raises KeyError for a definition that is not
    there.
    """
    names = {path.removesuffix(".py"): text for path, text in files.items()}
    modules = {name: _read(name, text) for name, text in names.items()}
    included, imports = _used(modules, wanted)
    chosen = {
        id(node): (module, node)
        for module in modules.values()
        for name, node in module.definitions.items()
        if (module.name, name) in included
    }
    constants: list[str] = []
    blocks: list[str] = []
    for module, node in chosen.values():
        is_block = isinstance(node, ast.FunctionDef | ast.ClassDef)
        (blocks if is_block else constants).append(_source(module, node))
    top = "\n\n".join(part for part in (_import_block(imports), "\n".join(constants)) if part)
    return "\n\n\n".join([top, *blocks]) + "\n"


def _used(
    modules: Mapping[str, Module], wanted: Sequence[Definition]
) -> tuple[set[Definition], set[Import]]:
    """The wanted definitions with all of these modules that they use, and what they import of
    others.
    """
    included: set[Definition] = set()
    imports: set[Import] = set()
    pending = list(wanted)
    while pending:
        home, name = pending.pop()
        if (home, name) in included:
            continue
        included.add((home, name))
        module = modules[home]
        parts = ast.walk(module.definitions[name])
        for used in {part.id for part in parts if isinstance(part, ast.Name)}:
            if used in module.definitions:
                pending.append((home, used))
            elif used in module.imports:
                source, alias = module.imports[used]
                if source in modules:
                    pending.append((source, alias.name))
                else:
                    imports.add((source, alias.name, alias.asname or ""))
    return included, imports


def _read(name: str, text: str) -> Module:
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, tuple[str, ast.alias]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {
                inner.id: node
                for target in targets
                for inner in ast.walk(target)
                if isinstance(inner, ast.Name)
            }
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                bound = alias.asname or (alias.name if source else alias.name.partition(".")[0])
                imports[bound] = (source, alias)
    return Module(name, text.splitlines(), definitions, imports)


def _source(module: Module, node: ast.stmt) -> str:
    """The lines of a definition, with its decorators and the comment above it."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first > 0 and module.lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(module.lines[first : node.end_lineno])


def _import_block(imports: Iterable[Import]) -> str:
    """Import lines as isort leaves them: the standard library first, `import x` before `from x
    import y`.
    """
    by_source: dict[str, list[str]] = {}
    for source, name, asname in imports:
        by_source.setdefault(source, []).append(f"{name}{f' as {asname}' if asname else ''}")
    lines = [f"import {name}" for name in sorted(by_source.pop("", []))]
    for source in sorted(by_source, key=str.lower):
        names = sorted(by_source[source], key=_isort_key)
        line = f"from {source} import {', '.join(names)}"
        inner = "".join(f"    {name},\n" for name in names)
        lines.append(line if len(line) <= 88 else f"from {source} import (\n{inner})")
    groups: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        groups[line.split()[1].partition(".")[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(group) for group in groups.values() if group)


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

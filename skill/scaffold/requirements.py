"""What a generated project needs: the distributions of what its files import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping

from ..spec import Spec
from ..spec.torch_versions import chosen

DISTRIBUTIONS = {
    "PIL": "pillow",
    "ray": "ray[train]",
    "verified_fsdp2": "verified-fsdp2",
}  # module: distribution, where the names differ
TORCH = "torch"


def requirements(spec: Spec, files: Mapping[str, str], wanted: list[str]) -> list[str]:
    """torch, of the version of the spec or else the installed one; then what `files` import, and
    the packages `wanted`.

    The modules of the project, of the user and of the standard library are no requirements, and its
    tests are not looked at.
    """
    sources = {
        path: text
        for path, text in files.items()
        if path.endswith(".py") and not path.startswith("tests/")
    }
    own = {path.removesuffix(".py") for path in sources} | {
        *spec.own_modules,
        TORCH,
        *sys.stdlib_module_names,
    }
    names = {name for text in sources.values() for name in _imported(text)} - own
    others = {DISTRIBUTIONS.get(name, name) for name in names} | {*wanted}
    major, minor = chosen(spec["torch"])
    return [f"{TORCH}=={major}.{minor}.*", *sorted(others)]


def _imported(code: str) -> set[str]:
    """The top names of the absolute imports, at the start or in a function."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found

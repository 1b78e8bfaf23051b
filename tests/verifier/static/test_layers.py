"""The source layer gives hits and coverage; it knows neither rules nor verdicts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from verified_fsdp2.verifier import static

FOLDER = Path(static.__file__).parent
ALLOWED = {"errors", "finding"}  # of verifier/, besides the layer itself


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_imports_go_downwards(path: Path) -> None:
    depth = len(path.relative_to(FOLDER).parts)  # of the dots that leave the layer, also in functions
    outside = {
        (node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level > depth
    }
    assert outside <= ALLOWED

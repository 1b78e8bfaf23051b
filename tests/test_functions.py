"""No function is longer than can be read at once, but for those with a reason."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 40  # lines of code, without docstring, comments and empty lines
REASONS = {
    "skill/cli/verify.py add_parser": "a flat table of options",
    "skill/cli/plan.py add_parser": "a flat table of options",
    "verifier/probe/substitutes/cuda_on_cpu/placement.py __torch_dispatch__": (
        "one chain of cases, called for every operator: a call more costs each of them"
    ),
}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
}


def code_lines(text: str) -> set[int]:
    """The lines of a source that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def lengths(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines of code) of each function of a module."""
    text = path.read_text(encoding="utf-8")
    code, where = code_lines(text), path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = code & set(range(node.lineno, (node.end_lineno or 0) + 1))
            if ast.get_docstring(node) is not None:
                own -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            yield f"{where} {node.name}", len(own)


def test_no_function_is_longer_than_can_be_read() -> None:
    modules = [p for folder in ("skill", "verifier") for p in (ROOT / folder).rglob("*.py")]
    found = {name: length for path in modules for name, length in lengths(path)}
    long = {name for name, length in found.items() if length > MOST}
    assert long - set(REASONS) == set(), "split it by thought, or say why not in REASONS"
    assert set(REASONS) <= long, "a reason for a function that is short"

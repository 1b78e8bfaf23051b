"""The errors of PyYAML's parser in plainer messages."""

from __future__ import annotations

from typing import Any

import yaml


def described(error: Any, text: str) -> tuple[int, int, str]:
    """(line, column, message) of an error in `text`; line and column count from 0."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        column = len(before) - (before.rfind("\n") + 1)
        return (
            before.count("\n"),
            column,
            f"the character U+{ord(text[error.position]):04X} is not allowed",
        )
    mark = error.problem_mark or error.context_mark
    problem, context = error.problem or "", error.context or ""
    if "quoted scalar" in context and "end of stream" in problem:
        mark, message = error.context_mark, "this quote is never closed"
    elif "'\\t'" in problem:
        message = "a tab; YAML indents with spaces"
    elif "mapping values are not allowed here" in problem:
        message = "a ':' is not expected here; check the indentation, or quote the value"
    elif "could not find expected ':'" in problem:
        mark, message = error.context_mark or mark, "a ':' is missing after this"
    elif "flow" in context and error.context_mark and ("end" in problem or "got" in problem):
        mark, message = error.context_mark, "this bracket is not closed"
    elif "expected <block end>" in problem:
        message = "this does not belong here; check the indentation and the quotes"
    elif "unknown escape" in problem:
        message = f"{problem.removeprefix('found ')}; use single quotes for text with backslashes"
    else:
        message = problem or context or "cannot be read"
    written = text.split("\n")[mark.line : mark.line + 1]
    if written and "{stdlib}" in written[0]:
        message = "a path that starts with '{' needs quotes: \"{stdlib}/...\""
    return mark.line, mark.column, message

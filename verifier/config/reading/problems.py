"""What can be wrong in a file: one problem with its place, and the error that carries all of
them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import UserError

KeyPath = tuple[str | int, ...]

MAX_SHOWN = 100
WINDOW = 110
LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@dataclass(frozen=True)
class Source:
    """A text that values come from: a file, or one `--set`. `noun` is what messages call it."""

    name: str
    lines: tuple[str, ...]
    order: int = 0
    is_file: bool = True
    noun: str = "a spec"


@dataclass(frozen=True)
class Place:
    """A position in a source; line and column count from 1, and line 0 is the source as a whole."""

    source: Source
    line: int = 0
    column: int = 0

    def sort_key(self) -> tuple[int, int, int]:
        return (self.source.order, self.line, self.column)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where, and (in the message) what to write instead."""

    place: Place
    message: str
    key: str = ""

    def to_dict(self) -> dict[str, Any]:
        line, column = (self.place.line, self.place.column) if self.place.source.is_file else (0, 0)
        place = {"file": self.place.source.name, "line": line or None, "column": column or None}
        return {**place, "message": self.message, "key": self.key or None}

    def __str__(self) -> str:
        source, line, column = self.place.source, self.place.line, self.place.column
        position = f":{line}:{column}" if line and source.is_file else ""
        text = f"{source.name}{position}: {self.message}"
        if 0 < line <= len(source.lines) and source.lines[line - 1].strip():
            text += "\n" + excerpt(source.lines[line - 1], column)
        return text


class NotValid(UserError):
    """The file is not valid; `problems` holds everything that is wrong, in file order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place.sort_key()))
        shown = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"... and {len(self.problems) - MAX_SHOWN} more problems")
        super().__init__("\n".join(shown))


def excerpt(line: str, column: int) -> str:
    """The source line and a caret under `column`; a long line is cut to the part around it."""
    start = max(0, column - 1 - WINDOW // 2) if len(line) > WINDOW else 0
    part = line[start : start + WINDOW]
    shown = "".join(char if char.isprintable() or char == "\t" else "?" for char in part).rstrip()
    wide = (
        "  " if unicodedata.east_asian_width(char) in "WF" else " "
        for char in line[start : column - 1]
    )
    pad = "".join(
        "\t" if char == "\t" else blank for char, blank in zip(line[start:], wide, strict=False)
    )
    return f"    {shown}\n    {pad}^"


def dotted(path: KeyPath) -> str:
    """`("verify", "reshard_to", 1)` as `verify.reshard_to[1]`."""
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
    return text if text.isprintable() else repr(text)[1:-1]


def quoted(value: object, limit: int = 60) -> str:
    """A value as it appears in a message: one line, escaped, not too long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[0]}"

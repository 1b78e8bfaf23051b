"""Text for a terminal: wrapped between words, in tables no wider than the terminal."""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

LEAST, MOST = 40, 120  # columns
ROOM = 30  # columns that the last cell of a row needs beside the others


def width() -> int:
    """The columns of COLUMNS or of the terminal on stdout, at most MOST; MOST where there is
    neither.
    """
    found = os.environ.get("COLUMNS", "")
    try:
        if found.isdigit():
            columns = int(found)
        else:
            columns = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        columns = 0
    return min(max(columns, LEAST), MOST) if columns else MOST


def wrapped(text: str, first: str = "", further: str | None = None) -> list[str]:
    """The lines of `text`, the first after `first`, the others after `further` (default: blanks of
    the same length).

    A word that is wider than the terminal, such as a path, stays whole.
    """
    indent = " " * len(first) if further is None else further
    lines = textwrap.wrap(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def paragraphs(text: str) -> str:
    """The text wrapped: lines without indentation run on until a blank or indented line; an
    indented line stays a line.

    What stands beside a command, two blanks or more after it, is wrapped there, or below it where
    there is no room.
    """
    lines: list[str] = []
    pending: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip() and not line[0].isspace():
            pending.append(line)
            continue
        lines += wrapped(" ".join(pending)) if pending else []
        pending = []
        blanks, text = re.findall(r"^( *)(.*)", line)[0]
        command, beside = re.findall(r"^(.*?  +(?![# ]))?(.*)", text)[0]
        if len(line) <= width():
            lines.append(line)
        elif command and width() - len(blanks + command) < ROOM:
            lines += [blanks + command.rstrip(), *wrapped(beside, blanks + "    ")]
        else:
            lines += wrapped(beside, blanks + command, None if command else blanks + "    ")
    return "\n".join(lines).rstrip()


def table(rows: Sequence[Sequence[str]], indent: str = "", size: int = 0) -> Iterator[str]:
    """Rows in columns, the first at least `size` wide; the last one wrapped, below the others if
    these leave it no room.
    """
    sizes = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    sizes[0] = max(size, sizes[0])
    beside = len(indent) + sum(found + 2 for found in sizes)
    for row in rows:
        head = indent + "".join(
            f"{cell:<{found}}  " for cell, found in zip(row, sizes, strict=False)
        )
        if width() - beside >= ROOM:
            yield from wrapped(row[-1], head) if row[-1] else [head.rstrip()]
        else:
            yield from wrapped("  ".join(filter(None, row[:-1])), indent, indent + "  ")
            yield from wrapped(row[-1], indent + "    ") if row[-1] else ()

"""What a DDP or FSDP1 script has to change, by the place of each construct in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...verifier.config.reading import inputs
from ...verifier.errors import UserError
from ...verifier.source.events import Event
from ...verifier.source.migration import constructs, table

Range = tuple[int, int, int, int]  # first line and column, last line and column
KINDS = ("ddp", "fsdp1")


@dataclass(frozen=True, eq=False)
class Construct:
    """A row of the table of `lint --migrate`, and where it stands in the script."""

    row: str
    event: Event
    values: dict[str, str]
    line: int


@dataclass
class Found:
    """What a script has to change."""

    path: Path
    kind: str
    source: str
    places: dict[Range, list[Construct]] = field(default_factory=dict)
    elsewhere: list[Construct] = field(default_factory=list)  # in files that it imports

    def all(self) -> Iterator[Construct]:
        """The constructs of the script itself."""
        for found in self.places.values():
            yield from found


@dataclass(frozen=True)
class Todo:
    """A construct that has no single counterpart, and what to do about it."""

    line: int
    construct: str
    rule: str
    text: str
    file: str = ""


@dataclass(frozen=True)
class Converted:
    """The new text, the constructs that it replaces, (line, construct), and those that it marks."""

    kind: str
    text: str
    done: tuple[tuple[int, str], ...]
    todo: tuple[Todo, ...]


def find(path: Path) -> Found:
    """What a script has to change. Raises UserError for one that is no DDP or FSDP1 script."""
    path = path.resolve()
    found = Found(path, "", "")
    lines: list[str] = []
    for kind, row, event, values in constructs([path]):
        if kind in KINDS:
            found.kind = found.kind or kind
        elif event is None:
            raise UserError(
                f"{path}: it converts DDP and FSDP1 scripts, and this is {_named(kind)}; see fsdp2"
                " lint --migrate"
            )
        if event is None:
            found.source = found.source or _source(path)
            lines = lines or found.source.splitlines()
            continue
        one = Construct(row, event, values, int(values.get("line", event.line)))
        if event.module.path.resolve() != path:
            found.elsewhere.append(one)
        elif all(
            (old.row, old.line) != (row, one.line)
            for old in found.places.setdefault(_range(event.node, lines), [])
        ):
            found.places[_range(event.node, lines)].append(one)
    if not found.kind:
        raise UserError(
            f"{path}: it converts DDP and FSDP1 scripts, and found no training in this one"
        )
    return found


def _source(path: Path) -> str:
    try:
        return inputs.text(path, inputs.SCRIPT)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8 first") from None


def todo(construct: Construct) -> Todo:
    """What is to be done about a construct, from the table."""
    row: dict[str, Any] = table()[construct.row]
    text = row["fsdp2"]
    for name, value in construct.values.items():
        text = text.replace(f"${name}", value)
    rule = row.get("rules", ["migrate"])[0]
    return Todo(construct.line, construct.row, rule, text, str(construct.event.module.path))


def _named(kind: str) -> str:
    return {"single": "one of a single process", "fsdp2": "one of FSDP2 already"}.get(
        kind, f"one of {kind}"
    )


def _range(node: ast.AST, lines: list[str]) -> Range:
    """Where a node stands, columns in characters as libcst counts them."""
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
    start, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    return first, _characters(lines, first, start), last, _characters(lines, last, end)


def _characters(lines: list[str], line: int, column: int) -> int:
    text = lines[line - 1] if line <= len(lines) else ""
    return column if text.isascii() else len(text.encode()[:column].decode())

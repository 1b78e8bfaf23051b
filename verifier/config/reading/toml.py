"""A table of a TOML file as a Document.

`tomllib` keeps no positions: they are those of the lines that look like a key.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

from .document import MAX_DEPTH, Document
from .problems import KeyPath, Place, Source

_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_KEY = re.compile(rf"(\s*)((?:{_PART.pattern})(?:\s*\.\s*(?:{_PART.pattern}))*)\s*=\s*")
# In one line: the time that tomllib takes for a dotted key grows with the square of its parts.
_DOTS = 5000
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read(text: str, source: Source, table: tuple[str, ...]) -> Document | None:
    """The table of this name; None if the file has none."""
    import tomllib

    document = Document(source)
    if crowded := next((n for n, line in enumerate(source.lines, 1) if line.count(".") > _DOTS), 0):
        message = f"more than {_DOTS} dots in one line; split it"
        document.refuse((), Place(source, crowded, 1), message)
        return document
    try:
        data: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT.search(str(error))
        line, column = (int(at[1]), int(at[2])) if at and at[1] else (len(source.lines), 1)
        document.refuse(
            (), Place(source, line, column), f"not valid TOML: {_AT.sub('', str(error))}"
        )
        return document
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, brackets in brackets
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        document.refuse((), Place(source, 1, 1), f"not valid TOML: {reason}")
        return document
    for name in table:
        data = data.get(name) if isinstance(data, dict) else None
    if data is None:
        return None
    document.empty = False
    _find_places(document, table)
    try:
        document.data = _plain(data)
    except _TooDeep:
        place = document.values.get((), Place(source, 1, 1))
        document.refuse((), place, f"nested more than {MAX_DEPTH} levels deep")
    return document


class _TooDeep(Exception):
    """Values in values beyond what a configuration may have."""


def _plain(value: Any, depth: int = 1) -> Any:
    """The value as YAML would have it: a date is its text. Raises _TooDeep."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, dict | list) and depth > MAX_DEPTH:
        raise _TooDeep
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return [_plain(item, depth + 1) for item in value] if isinstance(value, list) else value


def _find_places(document: Document, table: tuple[str, ...]) -> None:
    here: KeyPath = ()
    count: dict[KeyPath, int] = {}
    for number, line in enumerate(document.source.lines, start=1):
        if header := _HEADER.match(line):
            *above, last = _parts(header[2])
            here = ()
            for part in above:  # what is below a list of tables is in its last one
                here = (*here, part)
                here = (*here, count[here]) if here in count else here
            here = (*here, last)
            if header[1] == "[[":
                count[here] = count.get(here, -1) + 1
                here = (*here, count[here])
            _put(
                document,
                table,
                here,
                Place(document.source, number, len(line) - len(line.lstrip()) + 1),
                None,
            )
        elif key := _KEY.match(line):
            start, value = (
                Place(document.source, number, column + 1) for column in (len(key[1]), key.end())
            )
            _put(document, table, (*here, *_parts(key[2])), start, value)


def _put(
    document: Document, table: tuple[str, ...], path: KeyPath, key: Place, value: Place | None
) -> None:
    if path[: len(table)] == table:
        own = path[len(table) :]
        document.keys.setdefault(own, key)
        document.values.setdefault(own, value or key)


def _parts(text: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in _PART.findall(text))

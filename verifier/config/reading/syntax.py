"""PyYAML's parser as a stream of small events, and its errors in plainer messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One step of the parser: document, mapping, list, scalar, alias, or the end of a mapping or list."""

    kind: str
    line: int
    column: int
    value: str = ""
    plain: bool = False
    anchor: str = ""
    tag: str = ""


class Invalid(Exception):
    """The text is not YAML. Line and column count from 0."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.line, self.column, self.message = line, column, message


def events(text: str) -> Iterator[Event]:
    """The events of `text`. Raises Invalid where it stops being YAML."""
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            translated = _translate(event)
            if translated is not None:
                yield translated
    except yaml.MarkedYAMLError as error:
        invalid = _marked(error)
        written = text.split("\n")[invalid.line : invalid.line + 1]
        if written and "{stdlib}" in written[0]:
            invalid.message = "a path that starts with '{' needs quotes: \"{stdlib}/...\""
        raise invalid from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - (before.rfind("\n") + 1)
        raise Invalid(
            before.count("\n"), column, f"the character U+{ord(text[error.position]):04X} is not allowed"
        ) from None


def _translate(event: Any) -> Event | None:
    import yaml

    line, column = event.start_mark.line, event.start_mark.column
    if isinstance(event, yaml.DocumentStartEvent):
        version = "" if event.version in (None, (1, 2)) else "%YAML {}.{}".format(*event.version)
        return Event("document", line, column, version or ("%TAG" if event.tags else ""))
    if isinstance(event, yaml.AliasEvent):
        return Event("alias", line, column, event.anchor or "")
    anchor, tag = getattr(event, "anchor", None) or "", getattr(event, "tag", None) or ""
    if isinstance(event, yaml.ScalarEvent):
        return Event("scalar", line, column, event.value, event.style in (None, ""), anchor, tag)
    if isinstance(event, yaml.MappingStartEvent):
        return Event("mapping", line, column, anchor=anchor, tag=tag)
    if isinstance(event, yaml.SequenceStartEvent):
        return Event("list", line, column, anchor=anchor, tag=tag)
    if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        return Event("end", line, column)
    return None


def _marked(error: Any) -> Invalid:
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
    return Invalid(mark.line, mark.column, message)

"""A strict YAML reader: plain data, and the line and column of every key and value.

It works on the parser's events, so that nothing is lost or guessed: no tags, no aliases, no values
of another type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import yaml

from . import scalars, syntax
from .problems import KeyPath, Place, Problem, Source, dotted, quoted

MAX_DEPTH = 16


@dataclass
class Document:
    """What a text says and where it says it. `bad` holds the paths whose value cannot be trusted.

    `notes`: what is accepted, but will be refused by a later version.
    """

    source: Source
    data: Any = None
    empty: bool = True
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    bad: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def place(self, path: KeyPath, on_key: bool = False) -> Place:
        """Where `path` is written; what is not written is placed at the mapping that should hold
        it.
        """
        if not on_key and path in self.values:
            return self.values[path]
        while path and path not in self.keys:
            if isinstance(path[-1], int) and path in self.values:  # an item of a list has no key
                return self.values[path]
            path = path[:-1]
        return self.keys.get(path) or self.values.get(()) or Place(self.source)

    def trusted(self, path: KeyPath) -> bool:
        """Whether no part of the value at `path`, and nothing above it, was refused."""
        return not any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.bad)

    def refuse(self, path: KeyPath, place: Place, message: str) -> None:
        self.bad.add(path)
        self.problems.append(Problem(place, message, dotted(path)))


class _Refused(Exception):
    """Reading stops at this place."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place, self.message = place, message


def read(text: str, source: Source, shift: int = 0) -> Document:
    """Read one YAML document. `shift` columns are added on its first line."""
    reader = _Reader(Document(source), text, shift)
    try:
        reader.run()
    except _Refused as refused:
        reader.document.refuse((), refused.place, refused.message)
    except yaml.YAMLError as error:
        line, column, message = syntax.described(error, text)
        reader.document.refuse((), reader.place(line, column), f"not valid YAML: {message}")
    return reader.document


class _Reader:
    def __init__(self, document: Document, text: str, shift: int) -> None:
        self.document, self.shift, self.noun = document, shift, document.source.noun
        self.events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)

    def run(self) -> None:
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                self.document.data, self.document.empty = self.node(event, ()), False
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.stop(
                        event, f"a second YAML document starts here; {self.noun} is one document"
                    )
                if directive := _directive(event):
                    raise self.stop(
                        event,
                        f"the directive {quoted(directive)} is not used in {self.noun}; remove it",
                    )

    def node(self, event: Any, path: KeyPath, depth: int = 1, refused: bool = False) -> Any:
        """The value that starts with this event.

        What is under a refused key goes to a path of its own.
        """
        place = self.start(event)
        if refused:
            path = (*path, "", place.line, place.column)
        else:
            self.document.values[path] = place
        value, wrong = _value(event, self.noun)
        if wrong and not refused:
            self.document.refuse(path, place, wrong)
        if not isinstance(event, yaml.CollectionStartEvent):
            return value
        if depth > MAX_DEPTH:
            raise self.stop(event, f"nested more than {MAX_DEPTH} levels deep")
        inside = takewhile(
            lambda event: not isinstance(event, yaml.CollectionEndEvent), self.events
        )
        if isinstance(event, yaml.SequenceStartEvent):
            return [
                self.node(item, (*path, number), depth + 1) for number, item in enumerate(inside)
            ]
        found = {}
        for key in inside:
            good = self.is_good_key(key, path)
            value = self.node(next(self.events), (*path, key.value), depth + 1, refused=not good)
            if good:
                found[key.value] = value
        return found

    def is_good_key(self, event: Any, above: KeyPath) -> bool:
        """Whether a key can be used; what is wrong with it is noted."""
        if not isinstance(event, yaml.ScalarEvent):
            raise self.stop(
                event, "a key must be a word; quote it if it starts with '*', '&', '[' or '{'"
            )
        key, place = event.value, self.start(event)
        path = (*above, key)
        value, wrong = _value(event, self.noun)
        if not wrong and key == "<<" and _is_plain(event):
            wrong = f"merge keys ('<<') are not used in {self.noun}; write the keys out"
        elif not wrong and not isinstance(value, str):
            wrong = f"a key must be text; put quotes around {key or 'the empty key'}"
        if wrong:
            self.document.refuse(path, place, wrong)
        elif path in self.document.keys:
            where = f" in {dotted(above)}" if above else ""
            message = (
                f"duplicate key {quoted(key)}{where}; it is already on line"
                f" {self.document.keys[path].line}"
            )
            self.document.problems.append(Problem(place, message, dotted(path)))
        else:
            self.document.keys[path] = place
            return True
        return False

    def start(self, event: Any) -> Place:
        return self.place(event.start_mark.line, event.start_mark.column)

    def place(self, line: int, column: int) -> Place:
        return Place(self.document.source, line + 1, column + 1 + (self.shift if line == 0 else 0))

    def stop(self, event: Any, message: str) -> _Refused:
        return _Refused(self.start(event), message)


def _directive(event: Any) -> str:
    """A directive before the document that changes how it is read."""
    if event.version not in (None, (1, 2)):
        return "%YAML {}.{}".format(*event.version)
    return "%TAG" if event.tags else ""


def _is_plain(event: Any) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.style in (None, "")


def _value(event: Any, noun: str) -> tuple[scalars.Scalar, str]:
    """The value of a scalar, and what is wrong with the way a node is written."""
    if isinstance(event, yaml.AliasEvent):
        return None, f"aliases ('*{event.anchor}') are not used in {noun}; write the value out"
    text = getattr(event, "value", "")
    wrong = ""
    if event.anchor:
        wrong = f"anchors ('&{event.anchor}') are not used in {noun}; remove it"
    elif event.tag:
        wrong = f"tags ({quoted(event.tag)}) are not used in {noun}; remove it"
    elif any("\ud800" <= char <= "\udfff" for char in text):
        wrong = "half a character (a surrogate escape); write the character itself"
    if not _is_plain(event):
        return text, wrong
    try:
        return scalars.resolve(text), wrong
    except ValueError as error:
        return None, f"{error} is too long for {noun}"

"""A strict YAML reader: plain data, and the line and column of every key and value.

It works on the parser's events, so that nothing is lost or guessed: no recursion, no tags, no aliases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
        """Where `path` is written; what is not written is placed at the mapping that should hold it."""
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


@dataclass
class _Frame:
    """A mapping or a list that is being read. `key` is the key whose value comes next."""

    path: KeyPath
    container: dict[str, Any] | list[Any]
    key: str | None = None
    ignored: bool = False


class _Refused(Exception):
    """Reading stops here; the problem is already recorded."""


def read(text: str, source: Source, shift: int = 0) -> Document:
    """Read one YAML document. `shift` columns are added on its first line."""
    document = Document(source)
    try:
        _Reader(document, shift).run(syntax.events(text))
    except syntax.Invalid as invalid:
        line, column = invalid.line + 1, invalid.column + 1 + (shift if invalid.line == 0 else 0)
        document.refuse((), Place(source, line, column), f"not valid YAML: {invalid.message}")
    except _Refused:
        pass
    return document


class _Reader:
    def __init__(self, document: Document, shift: int) -> None:
        self.document, self.shift = document, shift
        self.stack: list[_Frame] = []
        self.noun = document.source.noun

    def run(self, events: Iterator[syntax.Event]) -> None:
        documents = 0
        for event in events:
            if event.kind == "end":
                self.stack.pop()
            elif event.kind != "document":
                self.node(event)
            elif documents:
                self.stop(event, f"a second YAML document starts here; {self.noun} is one document")
            elif event.value:
                self.stop(event, f"the directive {quoted(event.value)} is not used in {self.noun}; remove it")
            documents += event.kind == "document"

    def node(self, event: syntax.Event) -> None:
        place = self.place(event)
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.container, dict) and frame.key is None:
            self.read_key(frame, event, place)
            return
        path = self.store(frame, place)
        value, wrong = _value(event, self.noun)
        if wrong and not (frame and frame.ignored):
            self.document.refuse(path, place, wrong)
        if event.kind == "scalar" or event.kind == "alias":
            self.put(frame, value)
            return
        container: dict[str, Any] | list[Any] = {} if event.kind == "mapping" else []
        self.put(frame, container)
        self.stack.append(_Frame(path, container))
        if len(self.stack) > MAX_DEPTH:
            self.stop(event, f"nested more than {MAX_DEPTH} levels deep")

    def read_key(self, frame: _Frame, event: syntax.Event, place: Place) -> None:
        if event.kind != "scalar":
            self.stop(event, "a key must be a word; quote it if it starts with '*', '&', '[' or '{'")
        value, wrong = _value(event, self.noun)
        key = event.value
        path = (*frame.path, key)
        frame.key, frame.ignored = key, True
        if wrong:
            self.document.refuse(path, place, wrong)
        elif event.plain and key == "<<":
            self.document.refuse(path, place, f"merge keys ('<<') are not used in {self.noun}; write the keys out")
        elif not isinstance(value, str):
            self.document.refuse(path, place, f"a key must be text; put quotes around {key or 'the empty key'}")
        elif path in self.document.keys:
            where = f" in {dotted(frame.path)}" if frame.path else ""
            message = f"duplicate key {quoted(key)}{where}; it is already on line {self.document.keys[path].line}"
            self.document.problems.append(Problem(place, message, dotted(path)))
        else:
            frame.ignored = False
            self.document.keys[path] = place

    def store(self, frame: _Frame | None, place: Place) -> KeyPath:
        """The path of the value that comes now; what is under a refused key goes to a path of its own."""
        if frame is None:
            path: KeyPath = ()
        elif isinstance(frame.container, dict):
            path = (*frame.path, frame.key or "")
            if frame.ignored:
                return (*path, "", place.line, place.column)
        else:
            path = (*frame.path, len(frame.container))
        self.document.values[path] = place
        return path

    def put(self, frame: _Frame | None, value: Any) -> None:
        if frame is None:
            self.document.data, self.document.empty = value, False
        elif isinstance(frame.container, list):
            frame.container.append(value)
        else:
            if not frame.ignored:
                frame.container[frame.key or ""] = value
            frame.key = None

    def place(self, event: syntax.Event) -> Place:
        shift = self.shift if event.line == 0 else 0
        return Place(self.document.source, event.line + 1, event.column + 1 + shift)

    def stop(self, event: syntax.Event, message: str) -> None:
        self.document.bad.add(())
        self.document.problems.append(Problem(self.place(event), message))
        raise _Refused


def _value(event: syntax.Event, noun: str) -> tuple[scalars.Scalar, str]:
    """The value of a scalar, and what is wrong with the way a node is written."""
    if event.kind == "alias":
        return None, f"aliases ('*{event.value}') are not used in {noun}; write the value out"
    wrong = ""
    if event.anchor:
        wrong = f"anchors ('&{event.anchor}') are not used in {noun}; remove it"
    elif event.tag:
        wrong = f"tags ({quoted(event.tag)}) are not used in {noun}; remove it"
    elif any("\ud800" <= char <= "\udfff" for char in event.value):
        wrong = "half a character (a surrogate escape); write the character itself"
    if event.kind != "scalar" or not event.plain:
        return event.value, wrong
    try:
        return scalars.resolve(event.value), wrong
    except ValueError as error:
        return None, f"{error} is too long for {noun}"

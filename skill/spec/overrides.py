"""`--set key=value`: values from the command line, put into the document before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...verifier.config.reading import document as reader
from ...verifier.config.reading.document import Document
from ...verifier.config.reading.problems import (
    LINE_BREAK,
    KeyPath,
    Place,
    Problem,
    Source,
    dotted,
    quoted,
)
from . import renamed, schema


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Set each `key=value` in the document, in order; what is wrong with one is noted as a
    problem.
    """
    for number, override in enumerate(overrides, start=1):
        key, equals, text = override.partition("=")
        key = key.strip()
        source = Source(
            f"--set {quoted(key)[1:-1]}", tuple(LINE_BREAK.split(override)), number, is_file=False
        )
        start = Place(source, 1, 1)
        path: KeyPath = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            message = "expected KEY=VALUE, as in --set optimizer.lr=1e-3"
            document.problems.append(Problem(start, message))
            continue
        if len(path) > reader.MAX_DEPTH:
            message = f"a key of {len(path)} parts: a spec has at most {reader.MAX_DEPTH} levels"
            document.problems.append(Problem(start, message))
            continue
        if (new := renamed.current(path)) != path:
            document.notes.append(renamed.note(start, dotted(path), dotted(new)))
            path = new
        value = reader.read(text, source, shift=len(override) - len(text))
        if value.problems:
            document.problems += [
                Problem(problem.place, problem.message, key) for problem in value.problems
            ]
            document.bad.add(path)
            continue
        _set(document, path, value, start)
    for section in schema.properties(schema.load()):
        _drop_other_kinds(document, section)


def _drop_other_kinds(document: Document, section: str) -> None:
    """A kind that an override chooses takes the section without the keys that the file has for
    another kind.
    """
    values = document.data.get(section) if isinstance(document.data, dict) else None
    place = document.values.get((section, "kind"))
    by_kind = schema.branches(schema.properties(schema.load())[section])
    if (
        not isinstance(values, dict)
        or place is None
        or place.source.is_file
        or str(values.get("kind")) not in by_kind
    ):
        return
    for key in values.keys() - by_kind[values["kind"]]["properties"].keys():
        if document.keys[section, key].source.is_file and any(
            key in kind["properties"] for kind in by_kind.values()
        ):
            del values[key]
            document.bad = {bad for bad in document.bad if bad[:2] != (section, key)}


def _set(document: Document, path: KeyPath, value: Document, start: Place) -> None:
    if document.data is None:
        document.data = {}
    target: Any = document.data
    for depth in range(len(path)):
        if not isinstance(target, dict):
            holder = dotted(path[:depth])
            message = (
                f"cannot set {dotted(path)}: {holder} is not a mapping; set {holder} as a whole"
            )
            document.problems.append(Problem(start, message, dotted(path)))
            return
        if depth == len(path) - 1:
            break
        part = path[depth]
        if target.get(part) is None:
            target[part] = {}
            document.keys.setdefault(path[: depth + 1], start)
            document.values[path[: depth + 1]] = start
        target = target[part]
    target[path[-1]] = value.data
    for places in (document.keys, document.values):
        for old in [known for known in places if known[: len(path)] == path]:
            del places[old]
    document.bad = {bad for bad in document.bad if bad[: len(path)] != path}
    document.keys[path] = start
    document.values[path] = start
    document.keys |= {path + below: place for below, place in value.keys.items()}
    document.values |= {path + below: place for below, place in value.values.items()}

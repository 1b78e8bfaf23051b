"""A JSON Schema as Python sees it: which keys a section has, their defaults, and how to say what a
value must be.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .problems import KeyPath

Schema = dict[str, Any]

TYPE_NAMES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
}
TYPE_NAMES |= {"array": "a list", "object": "a mapping", "null": "null"}


@dataclass(frozen=True, eq=False)
class Form:
    """What a kind of file may hold, by the JSON Schema `file` beside a module.

    `noun` is what messages call the file. `foreign`: the keys that a name of other programs,
    found in a section, can stand for, each with what it is; the likeliest first.
    """

    module: str
    file: str
    noun: str
    foreign: Callable[[str, str], Iterable[tuple[str, str]]] = lambda section, name: ()

    @cached_property
    def text(self) -> str:
        """The schema as it is written."""
        return (pkgutil.get_data(self.module, self.file) or b"").decode()

    @cached_property
    def root(self) -> Schema:
        """The schema. Do not change what it returns."""
        schema: Schema = json.loads(self.text)
        return schema

    def at(self, path: KeyPath) -> Schema | None:
        """The schema of the value at `path`, or None if there is no such key."""
        schema = self.root
        for part in path:
            found = schema.get("items") if isinstance(part, int) else properties(schema).get(part)
            if not isinstance(found, dict):
                return None
            schema = (
                self.root["definitions"][found["$ref"].rpartition("/")[2]]
                if "$ref" in found
                else found
            )
        return schema

    def walk(self) -> Iterator[tuple[str, Schema, Schema]]:
        """Every key, dotted, with its schema and the section it belongs to."""
        yield from _below("", self.root)


def properties(schema: Schema) -> dict[str, Schema]:
    found: dict[str, Schema] = schema.get("properties", {})
    return found


def branches(section: Schema) -> dict[str, Schema]:
    """For a section with a `kind`: kind -> the part of the schema that holds for it."""
    parts = section.get("allOf", [])
    return {
        kind: part["then"] for part in parts for kind in part["if"]["properties"]["kind"]["enum"]
    }


def kinds_of(section: Schema, key: str) -> list[str]:
    """The kinds of the section that have this key; empty if all of them have it."""
    by_kind = branches(section)
    found = [kind for kind, branch in by_kind.items() if key in branch["properties"]]
    return [] if len(found) == len(by_kind) else found


def keys(section: Schema, kind: object = None) -> list[str]:
    """The keys that a section (of this kind) may hold, in the order of the schema."""
    branch = branches(section).get(kind) if isinstance(kind, str) else None
    return list(properties(branch if branch is not None else section))


def required(section: Schema, key: str) -> bool:
    """Whether a section must hold this key (in the kinds that have it at all)."""
    return any(key in part.get("required", []) for part in (section, *branches(section).values()))


def _below(path: str, section: Schema) -> Iterator[tuple[str, Schema, Schema]]:
    for key, schema in properties(section).items():
        yield f"{path}{key}", schema, section
        yield from _below(f"{path}{key}.", schema)


def filled(data: Any, schema: Schema) -> Any:
    """A copy of `data` in which every absent key with a default has it, in the order of the
    schema.
    """
    if isinstance(data, list) and "items" in schema:
        return [filled(item, schema["items"]) for item in data]
    if not isinstance(data, dict) or "properties" not in schema:
        return data
    kind = data.get("kind", properties(schema).get("kind", {}).get("default"))
    resolved = not branches(schema) or (isinstance(kind, str) and kind in branches(schema))
    known = keys(schema, kind) if resolved else ["kind"]
    below = {key: properties(schema)[key] for key in known}
    defaults = {key: part["default"] for key, part in below.items() if "default" in part}
    given = {**defaults, **data}
    return {key: filled(given[key], part) for key, part in below.items() if key in given}


def expectation(schema: Schema) -> str:
    """What a value must be, as it reads after `must be`."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if schema.get("enum"):
        return _either([shown(choice) for choice in schema["enum"]])
    names = [
        TYPE_NAMES[name] for name in types if name not in ("string", "null") or len(types) == 1
    ]
    if "string" in types and len(types) > 1:
        names = (
            [shown(choice) for choice in schema.get("then", {}).get("enum", [])] or ["text"]
        ) + names
    if "null" in types and len(types) > 1:
        names.append("null")
    return _either(names)


def shown(choice: object) -> str:
    return repr(choice) if isinstance(choice, str) else json.dumps(choice)


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" or {names[-1]}"

"""The schema of the spec. What can be asked of any schema comes from `verifier/config/reading/schema.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...verifier.config.reading import schema as any_schema
from ...verifier.config.reading.problems import KeyPath
from ...verifier.config.reading.schema import Form, Schema, branches, keys, kinds_of, properties, required, shown

__all__ = [
    "FORM",
    "Schema",
    "at",
    "branches",
    "filled",
    "keys",
    "kinds_of",
    "load",
    "properties",
    "required",
    "shown",
    "walk",
]

PATH = Path(__file__).with_name("schema.json")
FORM = Form(PATH, "the spec")


def load() -> Schema:
    """The schema. Do not change what it returns."""
    return FORM.root


def at(path: KeyPath) -> Schema | None:
    """The schema of the value at `path`, or None if there is no such key."""
    return FORM.at(path)


def walk() -> Iterator[tuple[str, Schema, Schema]]:
    """Every key of the spec, dotted, with its schema and the section it belongs to."""
    return FORM.walk()


def filled(data: Any, schema: Schema | None = None) -> Any:
    """A copy of `data` in which every absent key with a default has it, in the order of the schema."""
    return any_schema.filled(data, load() if schema is None else schema)

"""The schema of the spec.

What can be asked of any schema comes from `verifier/config/reading/schema.py`.
"""

from __future__ import annotations

from typing import Any

from ...verifier.config.reading import schema as any_schema
from ...verifier.config.reading.schema import (
    Form,
    Schema,
    branches,
    keys,
    kinds_of,
    properties,
    required,
    shown,
)
from .foreign_names import keys_of

__all__ = ["FORM", "Schema", "at", "branches", "filled", "keys", "kinds_of", "load", "properties"]
__all__ += ["required", "shown", "walk"]

FORM = Form(__name__, "schema.json", "the spec", keys_of)
at, walk = FORM.at, FORM.walk


def load() -> Schema:
    """The schema. Do not change what it returns."""
    return FORM.root


def filled(data: Any, schema: Schema | None = None) -> Any:
    """A copy of `data` in which every absent key with a default has it, in the order of the
    schema.
    """
    return any_schema.filled(data, load() if schema is None else schema)

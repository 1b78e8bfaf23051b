"""Hold data against the schema: the jsonschema library finds the faults, our own words describe
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import words
from .problems import KeyPath, dotted
from .schema import Form, Schema

ORDER = (
    "type",
    "enum",
    "minLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the data: its key, where to point, and which other keys it puts
    in doubt.
    """

    key: KeyPath
    message: str
    at: KeyPath
    on_key: bool = False
    doubtful: tuple[KeyPath, ...] = ()


def faults(data: Any, form: Form) -> list[Fault]:
    """Everything in which `data` differs from the form, at most one fault a key."""
    grouped: dict[KeyPath, list[Any]] = {}
    for error in _validator(form).iter_errors(data):
        grouped.setdefault(tuple(error.absolute_path), []).append(error)
    found: dict[tuple[KeyPath, bool], Fault] = {}
    unknown = {
        path: list(
            _unknown(
                form, path, [error for error in errors if error.validator == "additionalProperties"]
            )
        )
        for path, errors in grouped.items()
    }
    meant = {key for ones in unknown.values() for fault in ones for key in fault.doubtful}
    for path, errors in grouped.items():
        missing = _missing(
            form, path, [error for error in errors if error.validator == "required"], meant
        )
        values = [
            error for error in errors if error.validator not in ("additionalProperties", "required")
        ]
        for fault in (*unknown[path], *missing, *_values(form, path, values)):
            found.setdefault((fault.key, fault.on_key), fault)
    return list(found.values())


@cache
def _validator(form: Form) -> Any:
    """Draft 7, except that 4.0 is no whole number, and neither .nan nor .inf is a number."""
    import jsonschema

    def integer(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def number(_: object, value: object) -> bool:
        return integer(_, value) or (isinstance(value, float) and math.isfinite(value))

    def pattern(_: object, regex: str, value: object, __: object) -> Iterator[Any]:
        # `$` in ECMA is the end; in Python it is also before a last newline
        if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", regex), value):
            yield jsonschema.ValidationError("pattern")

    checker = jsonschema.Draft7Validator.TYPE_CHECKER.redefine_many(
        {"integer": integer, "number": number}
    )
    extend: Any = jsonschema.validators.extend
    return extend(jsonschema.Draft7Validator, {"pattern": pattern}, type_checker=checker)(form.root)


def _unknown(form: Form, path: KeyPath, errors: list[Any]) -> Iterator[Fault]:
    """Keys that the section does not have; in doubt is the key that was probably meant."""
    if not errors:
        return
    narrowest: Schema = min(
        (error.schema for error in errors), key=lambda part: len(part["properties"])
    )
    section = form.at(path) or narrowest
    for key in errors[0].instance:
        if key in narrowest["properties"]:
            continue
        message, meant = words.unknown_key(
            form, path, key, section, list(narrowest["properties"]), errors[0].instance
        )
        doubtful = (meant,) if meant else ()
        yield Fault((*path, key), message, (*path, key), on_key=True, doubtful=doubtful)


def _missing(form: Form, path: KeyPath, errors: list[Any], meant: set[KeyPath]) -> Iterator[Fault]:
    """Required keys that are not there, unless a misspelt key or one elsewhere stands for them."""
    for error in errors:
        for key in error.validator_value:
            if key not in error.instance and (*path, key) not in meant:
                where = f" in {dotted(path)}" if path else ""
                wanted = words.wanted(key, form.at((*path, key)))
                yield Fault((*path, key), f"missing key {key!r}{where}{wanted}", path, on_key=True)


def _values(form: Form, path: KeyPath, errors: list[Any]) -> Iterator[Fault]:
    if not errors:
        return
    rank = {name: number for number, name in enumerate(ORDER)}
    error = min(errors, key=lambda error: rank.get(error.validator, len(rank)))
    if "propertyNames" in error.absolute_schema_path:
        for error in errors:
            key = (*path, error.instance)
            yield Fault(
                key, f"{dotted(key)} must be {words.pattern(error.schema)}", key, on_key=True
            )
        return
    schema = form.at(path) or error.schema
    yield Fault(path, f"{dotted(path) or form.noun} {words.value(error, schema)}", path)

"""The base of every record: typed, frozen, and read back from JSON with the nested records rebuilt."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

Convert = Callable[[Any], Any]
_Record = TypeVar("_Record")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(cls: type[_Record]) -> type[_Record]:
    """A dataclass by keywords. The type checker forbids assignments; all methods but `__init__` are those of Part.

    Generated for each record, as with `frozen=True`, they would take half the time in which `fsdp2 lint` starts.
    """
    return dataclass(slots=True, kw_only=True, repr=False, eq=False)(cls)


@record
class Part:
    """A record within a record, such as a line of the user's code."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value, _ in _held(self))})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name, _ in _defaults_of(type(self)))

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name, _ in _defaults_of(type(self))))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON data; what has its default is left out."""
        return {name: _plain(value) for name, value, default in _held(self) if default is MISSING or value != default}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """What `to_json` gave. Raises TypeError if a field is missing or unknown."""
        plan = conversions(cls)
        return cls(**{name: plan[name](value) if name in plan else value for name, value in data.items()})


@record
class Event(Part):
    """One record of a trace. `seq`: its number on this rank; `at`: seconds on the clock of the launcher."""

    kind: ClassVar[str] = ""

    seq: int = 0
    at: float = 0.0

    def __init_subclass__(cls, **options: Any) -> None:
        cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.kind] = cls


KINDS: dict[str, type[Event]] = {}


def event_from_json(data: dict[str, Any]) -> Event:
    """The event of `{"kind": ..., "seq": ..., "at": ..., ...}`. Raises KeyError or TypeError if it is none."""
    rest = dict(data)
    return KINDS[rest.pop("kind")].from_json(rest)


_conversions: dict[type[Part], dict[str, Convert]] = {}
_defaults: dict[type[Part], tuple[tuple[str, Any], ...]] = {}


def conversions(cls: type[Part]) -> dict[str, Convert]:
    """{field: what rebuilds its value} for the fields that hold records."""
    if cls not in _conversions:
        hints = typing.get_type_hints(cls)
        found = {field.name: _conversion(hints[field.name]) for field in fields(cls)}
        _conversions[cls] = {name: convert for name, convert in found.items() if convert is not None}
    return _conversions[cls]


def _conversion(hint: Any) -> Convert | None:
    if isinstance(hint, type) and issubclass(hint, Part):
        return lambda value: value if isinstance(value, hint) else hint.from_json(value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        one = next((c for a in arguments if (c := _conversion(a)) is not None), None)
        return None if one is None else lambda value: None if value is None else one(value)
    inner = _conversion(arguments[-1]) if origin in (list, dict) else None
    if inner is None:
        return None
    if origin is list:
        return lambda values: [inner(value) for value in values]
    return lambda values: {key: inner(value) for key, value in values.items()}


def default_of(field: Field[Any]) -> Any:
    """The default of a field, MISSING if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _defaults_of(cls: type[Part]) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field."""
    if cls not in _defaults:
        _defaults[cls] = tuple((field.name, default_of(field)) for field in fields(cls))
    return _defaults[cls]


def _held(part: Part) -> Iterator[tuple[str, Any, Any]]:
    for name, default in _defaults_of(type(part)):
        yield name, getattr(part, name), default


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, list):
        return [_plain(item) for item in value] if value and isinstance(value[0], Part) else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value

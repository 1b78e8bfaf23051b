"""Transitional: records that still answer as the dicts they once were. It goes when every reader uses attributes."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .typed import Event, Part

Record: TypeAlias = Any  # what readers of dicts call a record


class LikeDict:
    """`record["field"]`, `record.get("field")`, `"field" in record` and `{**record}`; a field that is None counts as absent."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        value = getattr(self, name, None)
        return default if value is None else value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and getattr(self, name, None) is not None

    def keys(self) -> list[str]:
        named = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return ["kind", *named] if hasattr(type(self), "seq") else named

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


def lenient(data: dict[str, Any]) -> Event:
    """An event of a dict that a test wrote: what is missing is empty, what is unknown is left out."""
    from .typed import KINDS

    made: Event = _made(KINDS[data["kind"]], data)
    return made


def _made(cls: type[Part], data: Any) -> Any:
    from .typed import conversions, default_of

    if isinstance(data, cls):
        return data
    hints, plan = typing.get_type_hints(cls), conversions(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in data:
            value = data[field.name]
            values[field.name] = _nested(hints[field.name], value) if field.name in plan else value
        elif default_of(field) is MISSING:
            values[field.name] = _empty(hints[field.name])
    return cls(**values)


def _nested(hint: Any, value: Any) -> Any:
    from .typed import Part

    if value is None:
        return None
    if isinstance(hint, type) and issubclass(hint, Part):
        return _made(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [_nested(arguments[0], item) for item in value]
    if origin is dict:
        return {key: _nested(arguments[1], item) for key, item in value.items()}
    return _nested(next(a for a in arguments if a is not type(None)), value)


def _empty(hint: Any) -> Any:
    if type(None) in typing.get_args(hint):
        return None
    kind = typing.get_origin(hint) or hint
    return kind() if kind in (str, int, float, bool, list, dict) else None

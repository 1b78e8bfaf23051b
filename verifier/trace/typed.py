"""The base of every record: typed, frozen, and read back from JSON with the nested records
rebuilt.
"""

import functools
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self, dataclass_transform

Convert = Callable[[Any], Any]


def default_of(field: Field[Any]) -> Any:
    """The default of a field, MISSING if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Part:
    """A record within a record, such as a line of the user's code.

    Each subclass is a dataclass by keywords.

    The type checker forbids assignments. All methods but `__init__` are those of Part: generated
    for each record, as with `frozen=True`, they would take half the startup time of `fsdp2 lint`.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, repr=False, eq=False)(cls)
        cls._defaults = {field.name: default_of(field) for field in fields(cls)}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON data; fields that have their default value are omitted."""
        return {
            k: _plain(v)
            for k, v in vars(self).items()
            if (d := self._defaults[k]) is MISSING or v != d
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """What `to_json` gave. Raises TypeError if a field is missing or unknown."""
        plan = conversions(cls)  # type: ignore[arg-type]  # mypy takes the hash of instances for that of the class
        return cls(
            **{name: plan[name](value) if name in plan else value for name, value in data.items()}
        )


class Event(Part):
    """One record of a trace.

    `seq`: its number on this rank; `at`: seconds on the clock of the launcher.
    """

    kind: ClassVar[str] = ""

    seq: int = 0
    at: float = 0.0

    def __init_subclass__(cls, base: bool = False) -> None:
        super().__init_subclass__()
        if not base:
            cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
            KINDS[cls.kind] = cls


KINDS: dict[str, type[Event]] = {}


class Line(Part):
    """A line of a source."""

    file: str
    line: int
    function: str
    code: str


class Place(Line):
    """A line of the user's code.

    `library`: the line of a library to which it led; `through`: the lines of other files on the
    way, from there on, or the function that made its value; `callers`: the lines of other files of
    the user that led here. None of these identifies the place.
    """

    library: Line | None = None
    through: list[Line] = field(default_factory=list)
    callers: list[Line] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return self._own() == other._own() if isinstance(other, Place) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._own())

    def _own(self) -> tuple[str, int, str, str]:
        return self.file, self.line, self.function, self.code


class Located(Event, base=True):
    """An event at a line of the user's code; None where none of it is running."""

    at_line: Place | None


def event_from_json(data: dict[str, Any]) -> Event:
    """The event of `{"kind": ..., "seq": ..., "at": ..., ...}`.

    Raises KeyError or TypeError if it is none.
    """
    rest = dict(data)
    return KINDS[rest.pop("kind")].from_json(rest)


@functools.cache
def conversions(cls: type[Part]) -> dict[str, Convert]:
    """{field: what rebuilds its value} for the fields that hold records."""
    hints = typing.get_type_hints(cls)
    found = {field.name: _conversion(hints[field.name]) for field in fields(cls)}
    return {name: convert for name, convert in found.items() if convert is not None}


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


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, list):
        return [_plain(item) for item in value] if value and isinstance(value[0], Part) else value
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value

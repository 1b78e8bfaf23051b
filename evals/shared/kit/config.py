"""Settings: nested dataclasses, read from a YAML file and changed by words such as `optim.lr=3e-4`.

    settings = read(Settings, "configs/base.yaml", ["train.steps=200", "out=runs/one"])

Every key of the file must be a field, and every value must have the field's type: a misspelt key is an error that names what there is.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(Exception):
    """A setting that is unknown, or of another type than its field."""


def read(cls: type[T], path: str | Path, overrides: list[str] = ()) -> T:
    """The settings of a file, with the overrides of the command line."""
    text = Path(path).read_text(encoding="utf-8")
    values = yaml.safe_load(text) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(values).__name__}")
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: expected key=value")
        put(values, key.split("."), yaml.safe_load(value) if value else "")
    return fill(cls, values)


def put(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value at the end of a dotted path, with the dictionaries on the way."""
    *front, last = path
    for name in front:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{'.'.join(path)}: {name} has no keys of its own")
    values[last] = value


def fill(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """A dataclass made of a dictionary."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}{name}: no such setting; there are {', '.join(known)}")
    return cls(**{name: convert(value, hints[name], f"{where}{name}") for name, value in values.items()})


def convert(value: Any, kind: Any, where: str) -> Any:
    """The value as the type of its field."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        return convert(value, next(k for k in inner if k is not type(None)), where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected keys and values")
        return fill(kind, value, f"{where}.")
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list")
        item = inner[0] if inner else Any
        return origin(convert(one, item, f"{where}[{number}]") for number, one in enumerate(value))
    if kind is bool or isinstance(value, bool):
        if kind is not bool or not isinstance(value, bool):
            raise ConfigError(f"{where}: expected {name_of(kind)}, found {value!r}")
        return value
    if kind is float:  # YAML reads 3e-4 as a word
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: expected a number, found {value!r}") from None
    if kind is int and not isinstance(value, int):
        raise ConfigError(f"{where}: expected a whole number, found {value!r}")
    if kind is Path:
        return Path(str(value))
    if kind is str:
        return str(value)
    return value


def name_of(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def as_dict(settings: Any) -> dict[str, Any]:
    """Plain values, for a log or a file."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(settings))


def write(settings: Any, path: str | Path) -> None:
    """Beside the results, so that a run can be repeated."""
    Path(path).write_text(yaml.safe_dump(as_dict(settings), sort_keys=False), encoding="utf-8")

"""Records without credentials: a verdict, before any renderer sees it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

from .secret_values import HIDDEN
from .secrets import redact_named, redact_secrets

T = TypeVar("T")
_COMMAND_LINES = (
    *("command", "args", "save_args", "resume_args", "single_args"),
    *("reshard_args", "reference"),
)
_SHORTEST = 6  # characters of a value that is looked for everywhere


def redacted(value: T, known: tuple[str, ...] = ()) -> T:
    """The value with every text in it redacted: in records, lists and tables.

    `known`: values that are credentials wherever they stand. What holds no credential is returned
    as it is, the same object.
    """
    return cast(T, _redacted(value, known))


def given_secrets(target: Mapping[str, Any]) -> tuple[str, ...]:
    """The credentials on the command lines of a target: a message may quote one without a name."""
    lines = (str(target.get(key) or "") for key in _COMMAND_LINES)
    found = dict.fromkeys(value for line in lines for value in _given(line))
    return tuple(sorted(found, key=len, reverse=True))


def _given(line: str) -> Iterator[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        return
    pairs = [(name, value) for name, value in pairwise(words) if _option(name)]
    pairs += [(name, value) for name, equals, value in (w.partition("=") for w in words) if equals]
    for name, value in pairs:
        # `--save-args '--hub-token abc'`
        yield from _given(value) if " " in value and value != line else ()
        if len(value) >= _SHORTEST and redact_named(name, value) == HIDDEN:
            yield value


def _option(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("--") and "=" not in word


def _redacted(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return _table(value, known)
    if isinstance(value, list | tuple):
        return _list(value, known)
    if is_dataclass(value) and not isinstance(value, type):
        return _record(value, known)
    return value


def _table(table: Mapping[Any, Any], known: tuple[str, ...]) -> Mapping[Any, Any]:
    found = {_redacted(key, known): _named(key, value, known) for key, value in table.items()}
    same = all(a is b and found[a] is table[a] for a, b in zip(found, table, strict=False))
    return table if same and len(found) == len(table) else found


def _list(values: list[Any] | tuple[Any, ...], known: tuple[str, ...]) -> Any:
    found = [_redacted(value, known) for value in values]
    for number, (option, value) in enumerate(pairwise(values), 1):
        # the words of a command line: `--hub-token`, then its value
        if _option(option) and isinstance(value, str):
            found[number] = _named(option, value, known)
    if all(old is new for old, new in zip(values, found, strict=True)):
        return values
    if isinstance(values, list):
        return found
    return type(values)(*found) if hasattr(values, "_fields") else tuple(found)


def _record(record: Any, known: tuple[str, ...]) -> Any:
    old = {field.name: getattr(record, field.name) for field in fields(record) if field.init}
    new = {name: _redacted(value, known) for name, value in old.items()}
    return record if all(new[name] is old[name] for name in old) else type(record)(**new)


def _named(name: Any, value: Any, known: tuple[str, ...]) -> Any:
    value = _redacted(value, known)
    named = isinstance(name, str) and isinstance(value, str)
    # `--token --steps`: the option has no value
    return redact_named(name, value) if named and not value.startswith("--") else value

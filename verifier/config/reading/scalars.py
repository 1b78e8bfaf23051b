"""Plain scalars by the YAML 1.2 core schema (PyYAML's own rules are those of 1.1)."""

from __future__ import annotations

import re

Scalar = str | int | float | bool | None

MAX_DIGITS = 400

_WORDS: dict[str, Scalar] = {"": None, "~": None}
for _word, _value in (("null", None), ("true", True), ("false", False)):
    _WORDS |= {_word: _value, _word.capitalize(): _value, _word.upper(): _value}

_DECIMAL = re.compile(r"[-+]?[0-9]+", re.ASCII)
_OCTAL = re.compile(r"0o[0-7]+", re.ASCII)
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar: null, a bool, an int, a float, or else text.

    Raises ValueError for a number of more than `MAX_DIGITS` characters.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS and (
        _FLOAT.fullmatch(text) or _HEXADECIMAL.fullmatch(text) or _OCTAL.fullmatch(text)
    ):
        raise ValueError(f"a number of {len(text)} characters")
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text

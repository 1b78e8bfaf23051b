"""The strict YAML reader: scalars, places, and what it refuses."""

import math
import time

import pytest

from records import cases
from verified_fsdp2.verifier.config.reading import document, scalars
from verified_fsdp2.verifier.config.reading.problems import (
    LINE_BREAK,
    Place,
    Problem,
    Source,
    excerpt,
    quoted,
)


def read(text: str) -> document.Document:
    return document.read(text, Source("s", tuple(LINE_BREAK.split(text))))


@cases(
    "value, texts",
    *(
        (text, [text])
        for text in (
            "1:30",
            "1_000",
            "0b11",
            "yes",
            "on",
            "tRUE",
            ".",
            "e5",
            "2024-01-01",
            "nan",
            "=",
        )
    ),
    *((text, [text]) for text in ("No", "\u0661")),
    *(
        (1e-4, ["1e-4"]),
        (3e-4, ["3.0e-4"]),
        (1e5, ["1E5"]),
        (-0.5, ["-.5"]),
        (1.0, ["+1."]),
        (-math.inf, ["-.INF"]),
    ),
    *((15, ["0o17"]), (31, ["0x1f"]), (17, ["017"]), (0, ["-0"])),
    *((True, ["True"]), (False, ["FALSE"]), (None, ["~", "Null", ""])),
)
def test_scalar(value: object, texts: list[str]) -> None:
    for found in map(scalars.resolve, texts):
        assert found == value and type(found) is type(value)


def test_quoted_scalars_are_text_and_not_a_number_is_a_float() -> None:
    assert read("a: '1'\nb: \"true\"\nc: |\n  2\n").data == {"a": "1", "b": "true", "c": "2\n"}
    assert math.isnan(scalars.resolve(".NaN"))  # type: ignore[arg-type]


def test_places() -> None:
    found = read("a:\n  - 1\n  - {b: x, 'c d': [y]}\n")
    at = {path: (place.line, place.column) for path, place in found.values.items()}
    assert at == {
        (): (1, 1),
        ("a",): (2, 3),
        ("a", 0): (2, 5),
        ("a", 1): (3, 5),
        ("a", 1, "b"): (3, 9),
        ("a", 1, "c d"): (3, 19),
        ("a", 1, "c d", 0): (3, 20),
    }
    assert (found.keys["a", 1, "c d"].line, found.keys["a", 1, "c d"].column) == (3, 12)


def test_duplicates_keep_the_first_and_are_found_at_every_depth() -> None:
    found = read("a: {x: 1, x: 2}\nb: [{y: 1, y: {z: 1, z: 2}}]\na: 3\n")
    assert found.data == {"a": {"x": 1}, "b": [{"y": 1}]}
    places = [(problem.place.line, problem.place.column) for problem in found.problems]
    assert places == [(1, 11), (2, 12), (2, 22), (3, 1)]


@pytest.mark.parametrize(
    "text", ["[" * 30000, "{" * 30000, "- " * 30000, "a: " * 20000, "? " * 30000]
)
def test_deep_nesting_ends_soon(text: str) -> None:
    start = time.monotonic()
    assert read(text).problems
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("line", ["x" * 1000, "\t\tx", "a\x1b[31mb", "\u6f22\u5b57: x"])
def test_excerpt_is_short_and_printable(line: str) -> None:
    shown, caret = excerpt(line, min(len(line), 500)).splitlines()
    assert max(len(shown), len(caret)) < 130 and "\x1b" not in shown


def test_caret_is_under_wide_characters_and_tabs() -> None:
    assert excerpt("\u6f22: x", 4).splitlines()[1] == "    " + "    ^"
    assert excerpt("\t\tx", 3).splitlines()[1] == "    \t\t^"


def test_quoted_is_short_and_one_line() -> None:
    assert quoted("a\n" * 1000) == "'" + "a\\n" * 18 + "a" + "...'"
    assert "\n" not in str(Problem(Place(Source("f", ())), f"found {quoted(chr(27))}"))

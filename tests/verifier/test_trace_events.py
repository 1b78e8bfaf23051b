"""Events come back from a trace as they were written, with the records in them; what is no event is
foreign.
"""

import ast
import json
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from records import cases
from verified_fsdp2.verifier import trace
from verified_fsdp2.verifier.trace import Foreign, events
from verified_fsdp2.verifier.trace.reader import _read
from verified_fsdp2.verifier.trace.seal import mark
from verified_fsdp2.verifier.trace.writer import Writer

LINE = events.Place(file="train.py", line=3, function="main", code="x")
VALUES: dict[Any, Any] = {int: 7, float: 0.5, str: "text", bool: True}


def example(hint: Any) -> Any:
    """A value of a type, with one element in each list and dict."""
    if isinstance(hint, type) and issubclass(hint, events.Part):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name]) for f in fields(hint)})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [example(arguments[0])]
    if origin is dict:
        return {"key": example(arguments[1])}
    return example(arguments[0]) if arguments else VALUES[hint]


@pytest.mark.parametrize("kind", sorted(events.KINDS))
def test_an_event_comes_back_as_it_was_written(kind: str, tmp_path: Path) -> None:
    event = example(events.KINDS[kind])
    Writer(tmp_path / "rank0.jsonl", "secret").write(event)
    (found,) = _read(tmp_path / "rank0.jsonl", "secret")
    assert type(found) is type(event)
    assert {**found.to_json(), "seq": 7, "at": 0.5} == event.to_json()
    nested = [f.name for f in fields(found) if isinstance(getattr(event, f.name), events.Part)]
    assert all(type(getattr(found, name)) is type(getattr(event, name)) for name in nested)


def test_kinds_are_the_names_of_the_classes() -> None:
    assert events.SaveInFlight.kind == "save_in_flight"
    assert events.KINDS["to_empty"] is events.ToEmpty
    assert all(cls.__doc__ for cls in events.KINDS.values())


def test_every_event_and_every_field_is_read() -> None:
    """By more than the probe, which writes it."""
    root = Path(trace.__file__).parents[1]
    files = [
        p for p in root.rglob("*.py") if not {"probe", "events"} & {*p.relative_to(root).parts}
    ]
    nodes = [
        node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    own = {f.name for f in fields(events.Event)}
    names = [
        (cls.__name__, name)
        for cls in events.KINDS.values()
        for name in (cls.__name__, *{f.name for f in fields(cls)} - own)
    ]
    assert [pair for pair in names if pair[1] not in read] == []


@cases(
    "record",
    {"kind": "no_such_kind"},
    {"kind": "divide", "factor": 1.0},
    {"kind": "divide", "factor": 1.0, "at_line": None, "x": 1},
    [],
    ids=["kind", "field missing", "field unknown", "no record"],
)
def test_what_is_no_event_is_foreign(record: Any, tmp_path: Path) -> None:
    text = json.dumps(record)
    (tmp_path / "rank0.jsonl").write_text(f"{text}\t{mark('secret', 1, text)}\n")
    with pytest.raises(Foreign):
        _read(tmp_path / "rank0.jsonl", "secret")

"""The schema is what an editor and a reader need: draft-07, and every key described."""

import ast
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from verified_fsdp2.skill.spec import explain, schema
from verified_fsdp2.verifier.config.reading import validation

KEYS = {name: (found, section) for name, found, section in schema.walk()}


def test_schema_is_draft_7() -> None:
    assert schema.load()["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema.load())
    for section in schema.properties(schema.load()).values():
        for value in [section["default"], *section["examples"]] if "default" in section else []:
            jsonschema.Draft7Validator(section).validate(value)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_described(key: str) -> None:
    found, section = KEYS[key]
    assert found["description"].endswith(".")
    assert found["examples"]
    if key != "model.sequence_length":  # required in one kind, null in the other
        assert ("default" in found) != schema.required(section, key.rpartition(".")[2])


@pytest.mark.parametrize("key", [key for key in KEYS if "." in key])
def test_defaults_and_examples_are_valid(key: str) -> None:
    found, _ = KEYS[key]
    whole = {**found, "definitions": schema.load()["definitions"]}
    for value in [*found["examples"], *([found["default"]] if "default" in found else [])]:
        jsonschema.Draft7Validator(whole).validate(value)


def sections(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, list):
        return [found for item in part for found in sections(item)]
    if not isinstance(part, dict):
        return []
    own = [part] if part.get("type") == "object" else []
    return own + [found for item in part.values() for found in sections(item)]


def test_no_mapping_takes_unknown_keys() -> None:
    found = sections({key: part for key, part in schema.load().items() if key != "examples"})
    assert len(found) == 19
    for section in found:
        assert section["additionalProperties"] is False or "propertyNames" in section


def test_every_key_belongs_to_a_kind() -> None:
    for section in schema.properties(schema.load()).values():
        by_kind = schema.branches(section)
        if by_kind:
            assert set(by_kind) == set(section["properties"]["kind"]["enum"])
            known = {key for branch in by_kind.values() for key in branch["properties"]}
            assert known == set(section["properties"])
            assert all(branch["additionalProperties"] is False for branch in by_kind.values())


def test_keys_that_the_code_reads_are_in_the_schema() -> None:
    read = set()
    for path in Path(schema.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Subscript(
                    value=ast.Subscript(slice=ast.Constant(value=str(section))),
                    slice=ast.Constant(value=str(key)),
                ) if section in KEYS:
                    read.add(f"{section}.{key}")
    assert "train.global_batch" in read
    assert read <= set(KEYS)


def test_every_number_is_bounded() -> None:
    for key, (found, _) in KEYS.items():
        for part in (found, found.get("items", {})):
            kinds = [part["type"]] if isinstance(part.get("type"), str) else part.get("type", [])
            if {"integer", "number"} & {*kinds} and "enum" not in part:
                assert {"maximum", "exclusiveMaximum"} & part.keys(), key
                assert {"minimum", "exclusiveMinimum"} & part.keys(), key


@pytest.mark.parametrize("value", [True, False, 4.0, float("nan"), float("inf"), "4", None])
def test_not_a_whole_number(value: object) -> None:
    assert ("train", "steps") in {
        fault.key for fault in validation.faults({"train": {"steps": value}}, schema.FORM)
    }


@pytest.mark.parametrize("text", ["demo\n", "\ndemo", "demo\nx"])
def test_patterns_hold_for_the_whole_text(text: str) -> None:
    assert any(fault.key == ("name",) for fault in validation.faults({"name": text}, schema.FORM))


def test_pages_of_all_keys() -> None:
    for entry in explain.entries():
        page = explain.page(explain.find(entry["key"]))
        assert " ".join(entry["description"].split()) in " ".join(page.split())
        assert "examples" in page

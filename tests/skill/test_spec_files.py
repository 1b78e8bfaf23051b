"""The corpus: each spec in spec-files/ is valid, or its problems are exactly what stands below it.

`negative/NAME.case` holds a spec, byte for byte, the line ERROR, and what is printed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scripts import written
from verified_fsdp2.skill.spec import SpecError, load, schema

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).with_name("spec-files")
NEGATIVE = sorted((FILES / "negative").glob("*.case"))
ERROR = b"\n~~~ the error ~~~\n"  # its first newline is not the spec's
POSITIVE = sorted((FILES / "positive").glob("*.yaml")) + sorted((ROOT / "examples").glob("*.yaml"))


def names(paths: list[Path]) -> Iterator[str]:
    return (path.stem for path in paths)


def test_corpus_is_there() -> None:
    assert len(NEGATIVE) > 30
    assert len(POSITIVE) > 7


@pytest.mark.parametrize("path", NEGATIVE, ids=names(NEGATIVE))
def test_negative(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, error, printed = path.read_bytes().partition(ERROR)
    assert error
    (tmp_path / "data").symlink_to(path.parent / "data")
    (tmp_path / path.with_suffix(".yaml").name).write_bytes(spec)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(Path(path.with_suffix(".yaml").name))
    assert f"{caught.value}\n" == printed.decode()
    places = [(problem.place.line, problem.place.column) for problem in caught.value.problems]
    assert places == sorted(places)
    for raw in (
        "is not of type",
        "is not one of",
        "required property",
        "does not match",
        "were unexpected",
    ):
        assert raw not in str(caught.value)


@pytest.mark.parametrize("path", POSITIVE, ids=names(POSITIVE))
def test_what_is_shown_is_the_same_spec(path: Path, tmp_path: Path) -> None:
    spec = load(path)
    shown = written(tmp_path, spec.to_yaml(), "spec.yaml")
    again = load(shown)
    assert again == spec
    assert again.to_yaml() == spec.to_yaml()
    assert yaml.safe_load(spec.to_yaml()) == spec.to_dict()  # a YAML 1.1 reader agrees


@pytest.mark.parametrize("path", POSITIVE, ids=names(POSITIVE))
def test_every_key_is_shown_with_its_default(path: Path) -> None:
    encoding = "ascii" if ROOT / "examples" in path.parents else "utf-8"
    written, shown = yaml.safe_load(path.read_text(encoding=encoding)), load(path).to_dict()
    assert list(shown) == list(schema.load()["properties"])
    for name, section in schema.load()["properties"].items():
        if "properties" not in section:
            continue
        kind = shown[name].get("kind")
        assert list(shown[name]) == schema.keys(section, kind)
        for key, value in shown[name].items():
            default = section["properties"][key].get("default")
            from_preset = (written.get(name) or {}).get("preset") is not None
            derived = "auto" in (default.values() if isinstance(default, dict) else [default])
            if key not in (written.get(name) or {}) and not derived and not from_preset:
                assert value == default, f"{name}.{key}"


def test_text_survives() -> None:
    spec = load(FILES / "positive" / "text.yaml")
    assert spec.to_dict()["model"]["arguments"] == {
        "quotes": 'it\'s "quoted"',
        "lines": "first\nsecond\ttab",
        "template": "{{ name }} {% if x %} {# y #}",
        "backslash": "C:\\data",
        "accent": "caf\u00e9 \U0001f600",
        "nested": {"a key": [1, 2.5, None, True, {"b": "c"}]},
        "block": "two\nlines\n",
    }
    assert spec["checkpoint"]["directory"] == "out '\"{{ x }}\n"

"""Values that try to break out of their quotes."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml

from scripts import python
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.skill.scaffold.literals import (
    FILTERS,
    factory_call,
    markdown,
    own_import,
    py,
    text,
    yaml,
)

TEMPLATES = Path(__file__).parents[2] / "templates"
HOSTILE = [
    "plain",
    "it's",
    'say "so"',
    "both ' and \"",
    "three \"\"\" and '''",
    "back\\slash\\",
    "line\nbreak\r\ttab",
]
HOSTILE += [
    "{{ 7 * 7 }} {% raw %} {# note #}",
    "-->",
    "# comment",
    "`code` ``more``",
    "null",
    "1e4",
    "yes",
]
HOSTILE += [
    "\u00e9\u2028\U0001f600\x7f\x85",
    '"; import os; "',
    *("x" * n for n in (75, 79, 83, 200)),
    " ",
]
NESTED = {"a": HOSTILE, "b": {"c": [1, [2]]}}
VALUES: list[Any] = [*HOSTILE, 0, -1, True, None, 1e-8, 1e16, 0.1, [], {}, HOSTILE, NESTED]


def formatted(code: str) -> str:
    return python("-m", "ruff", "format", "--no-cache", "--isolated", "-", input=code).stdout


@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value)[:20])
def test_a_python_literal_reads_back(value: object) -> None:
    assert ast.literal_eval(py(value)) == value
    statement = ast.parse(py(value, name="NAME")).body
    assert len(statement) == 1 and isinstance(statement[0], ast.Assign)
    assert ast.literal_eval(statement[0].value) == value


def test_statements_are_formatted() -> None:
    code = "".join(py(value, name="NAME") + "\n" for value in VALUES)
    assert formatted(code) == code


@pytest.mark.parametrize(
    "value", [*HOSTILE, 3, True, None, [1, 4]], ids=lambda value: ascii(value)[:20]
)
def test_a_yaml_value_reads_back(value: object) -> None:
    assert pyyaml.safe_load(f"key: {yaml(value)}  # note") == {"key": value}


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
def test_a_code_span_stays_in_one_line_and_closed(value: str) -> None:
    span = markdown(value)
    assert span.isascii() and "\n" not in span
    fence = span[: len(span) - len(span.lstrip("`"))]
    assert span.endswith(fence) and fence not in span[len(fence) : -len(fence)]


def test_filters_are_used_and_fixed_text_is_none_from_a_spec() -> None:
    with pytest.raises(ValueError, match="not a fixed"):
        text('"; import os')
    sources = "".join(path.read_text() for path in TEMPLATES.iterdir())
    assert not [name for name in FILTERS if f"| {name}" not in sources]


def test_the_import_of_an_own_module() -> None:
    assert own_import("a.b:Net.build", "factory") == "    from a.b import Net as factory"
    assert factory_call("a.b:Net.build") == "factory.build"
    assert factory_call("a.b:Loader.load", "load_samples") == "load_samples.load"
    code = (
        f"def build():\n{own_import('package.' + 'm' * 80 + ':build', 'factory')}\n\n    return"
        " factory()\n"
    )
    assert "import (\n        build as factory,\n    )" in code
    assert formatted(code) == code


def test_a_hostile_spec_gives_projects_that_mean_what_it_says(tmp_path: Path) -> None:
    names = [
        name for name in HOSTILE if not set(name) & set("\r\n\t\x85\u2028\x7f") and name != " "
    ]
    files = [f"{number}-{name.replace('/', '_')[:90]}.txt" for number, name in enumerate(names)]
    for file in files:
        (tmp_path / file).write_text("text")
    model = {"kind": "import", "import": "package:build", "shard": ["Block"]}
    data = {
        "version": 1,
        "model": {
            **model,
            "arguments": {"hostile": HOSTILE},
            "vocabulary": 256,
            "sequence_length": 8,
        },
        "data": {"kind": "text", "files": files},
        "train": {"steps": 20, "global_batch": 8},
        "checkpoint": {"directory": "-->`'\"\\n{{ x }}\n''' \"\"\""},
    }
    (tmp_path / "spec.yaml").write_text(pyyaml.safe_dump(data))
    loaded = spec.load(tmp_path / "spec.yaml")
    rendered = scaffold.render(loaded)

    def constant(path: str, name: str) -> object:
        for node in ast.parse(rendered[path]).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == name
            ):
                return ast.literal_eval(node.value)
        raise AssertionError(name)

    assert constant("data.py", "FILES") == [str(tmp_path / file) for file in files]
    assert constant("model.py", "ARGUMENTS") == loaded["model"]["arguments"]
    assert constant("settings.py", "OUT") == data["checkpoint"]["directory"]  # type: ignore[index]
    assert pyyaml.safe_load(rendered["spec.yaml"]) == loaded.as_written()
    for path, code in rendered.items():
        if path.endswith(".py"):
            assert formatted(code) == code, path

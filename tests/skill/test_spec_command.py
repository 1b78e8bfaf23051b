"""fsdp2 spec: what its commands print and return, and how little they import."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from records import cases
from scripts import written
from verified_fsdp2.skill.cli import spec as command
from verified_fsdp2.skill.spec import load
from verified_fsdp2.verifier.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
BROKEN = Path(__file__).with_name("spec-files") / "negative" / "unknown-keys.yaml"


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="fsdp2")
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["spec", *argv])
    assert args.run is command.run
    return command.run(args)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run(*argv) == 0
    return capsys.readouterr().out


def test_check_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "check", str(QUICKSTART)) == (
        f"{QUICKSTART}: ok: 357,024 parameters, 2,048 tokens per step, 2 accumulation steps on 2 ranks\n"
    )


def test_check_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "check", str(QUICKSTART), "--set", "train.micro_batch=2", "--set", "model.layers=1")
    assert "4 accumulation steps" in text
    with pytest.raises(UserError, match=r"--set model.layers: .* 1, found 0"):
        run("check", str(QUICKSTART), "--set", "model.layers=0")


def test_several_specs_are_checked_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"(?s)unknown-keys\.yaml:2:1: .*none\.yaml: no such file"):
        run("check", str(QUICKSTART), str(BROKEN), "none.yaml")
    assert "quickstart.yaml: ok" in capsys.readouterr().out
    assert run("check", str(QUICKSTART), str(BROKEN), "--json") == 2
    assert {problem["file"] for problem in json.loads(capsys.readouterr().out)["problems"]} == {str(BROKEN)}


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "check", str(QUICKSTART), "--json")) == {"ok": True, "problems": []}
    message = "unknown key 'nmae'; did you mean 'name'?"
    for first in (
        {"file": str(BROKEN), "line": 2, "column": 1, "message": message, "key": "nmae"},
        {"file": "none.yaml", "line": None, "column": None, "message": "no such file", "key": None},
    ):
        assert run("check", str(first["file"]), "--json") == 2
        found = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["problems"][0]) == (False, first)


def test_show_is_a_spec_with_everything_in_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = output(capsys, "show", str(QUICKSTART))
    assert "#   parameters: 357024\n" in text
    assert yaml.safe_load(text)["model"]["ffn"] == 256
    path = written(tmp_path, text, "spec.yaml")
    assert load(path) == load(QUICKSTART)


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "show", str(QUICKSTART), "--set", "name=other", "--json"))
    assert found["spec"] == {**load(QUICKSTART).to_dict(), "name": "other"}
    sizes = {"parameters": 357024, "tokens_per_step": 2048, "gradient_accumulation_steps": 2, "mesh": [1, 2]}
    assert found["derived"] == sizes


def test_schema_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "schema"))["properties"]["version"]["enum"] == [1]
    page = output(capsys, "explain", "optimizer.lr")
    for part in ("optimizer.lr", "learning rate", "number > 0", "0.0003", "lr: 0.001"):
        assert part in page
    table = output(capsys, "explain")
    assert "optimizer.momentum" in table
    assert "(kind sgd)" in table
    assert "train.steps" in output(capsys, "explain", "train")
    found = json.loads(output(capsys, "explain", "train.max_norm", "--json"))
    assert (found["type"], found["default"], found["required"]) == ("number > 0 | null", 1.0, False)
    assert len(json.loads(output(capsys, "explain", "--json"))) > 50


@cases(
    "key, meant",
    ("lr", "optimizer.lr"),
    ("optimizer.rl", "optimizer.lr"),
    ("optmizer", "optimizer"),
    ("momentun", "optimizer.momentum"),
    ("train.global-batch", "train.global_batch"),
    ("train.max_nrm", "train.max_norm"),
)
def test_explain_of_an_unknown_key(key: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}'; did you mean '{meant}'?"):
        run("explain", key)
    assert run("explain", "verify.ranks") == 0, "an old name"


@pytest.mark.parametrize("argv", [[], ["check"], ["show"], ["schema"], ["explain"]])
def test_help_has_examples(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*argv, "--help")
    assert caught.value.code == 0 and "examples:\n  fsdp2 spec" in capsys.readouterr().out


CHECK = """
import argparse, sys
from verified_fsdp2.skill.cli import spec
parser = argparse.ArgumentParser()
spec.add_parser(parser.add_subparsers())
light = {"yaml", "jsonschema", "verified_fsdp2.skill.spec"} & set(sys.modules)
args = parser.parse_args(["spec", "check", sys.argv[1]])
code = args.run(args)
print(sorted(light), sorted({"torch", "jinja2", "numpy", "requests"} & set(sys.modules)))
sys.exit(code)
"""


def test_check_imports_little() -> None:
    command = [sys.executable, "-c", CHECK, str(QUICKSTART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[] []"


def test_examples_are_readable_by_any_yaml_reader() -> None:
    for path in (ROOT / "examples").glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="ascii"))["version"] == 1

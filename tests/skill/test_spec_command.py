"""fsdp2 spec: what its commands print and return."""

import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from records import cases
from scripts import Command, written
from verified_fsdp2.skill.spec import load

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
BROKEN = Path(__file__).with_name("spec-files") / "negative" / "unknown-keys.yaml"


@pytest.fixture
def run(command: Command) -> Command:
    """run(*words) -> Done of `spec`."""
    return partial(command, "spec")


def test_check_prints_one_line(run: Command) -> None:
    assert run("check", QUICKSTART, code=0).out == (
        f"{QUICKSTART}: ok: 357,024 parameters, 2,048 tokens per step, 2 accumulation steps on 2 ranks\n"
    )


def test_check_with_overrides(run: Command) -> None:
    words = ("check", QUICKSTART, "--set", "train.micro_batch=2", "--set")
    assert "4 accumulation steps" in run(*words, "model.layers=1", code=0).out
    assert re.search(r"--set model.layers: .* 1, found 0", run(*words, "model.layers=0", code=2).err)


def test_several_specs_are_checked_at_once(run: Command) -> None:
    done = run("check", QUICKSTART, BROKEN, "none.yaml", code=2)
    assert re.search(r"(?s)unknown-keys\.yaml:2:1: .*none\.yaml: no such file", done.err)
    assert "quickstart.yaml: ok" in done.out
    found = run("check", QUICKSTART, BROKEN, "--json", code=2).data
    assert {problem["file"] for problem in found["problems"]} == {str(BROKEN)}


def test_check_as_json(run: Command) -> None:
    assert run("check", QUICKSTART, "--json", code=0).data == {"ok": True, "problems": []}
    message = "unknown key 'nmae'; did you mean 'name'?"
    for first in (
        {"file": str(BROKEN), "line": 2, "column": 1, "message": message, "key": "nmae"},
        {"file": "none.yaml", "line": None, "column": None, "message": "no such file", "key": None},
    ):
        found = run("check", first["file"], "--json", code=2).data
        assert (found["ok"], found["problems"][0]) == (False, first)


def test_show_is_a_spec_with_everything_in_it(run: Command, tmp_path: Path) -> None:
    text = run("show", QUICKSTART, code=0).out
    assert "#   parameters: 357024\n" in text
    assert yaml.safe_load(text)["model"]["ffn"] == 256
    assert load(written(tmp_path, text, "spec.yaml")) == load(QUICKSTART)


def test_show_as_json(run: Command) -> None:
    found = run("show", QUICKSTART, "--set", "name=other", "--json", code=0).data
    assert found["spec"] == {**load(QUICKSTART).to_dict(), "name": "other"}
    sizes = {"parameters": 357024, "tokens_per_step": 2048, "gradient_accumulation_steps": 2, "mesh": [1, 2]}
    assert found["derived"] == sizes


def test_schema_and_explain(run: Command) -> None:
    assert run("schema", code=0).data["properties"]["version"]["enum"] == [1]
    page, table = run("explain", "optimizer.lr", code=0).out, run("explain", code=0).out
    parts = ("optimizer.lr", "learning rate", "number > 0", "0.0003", "lr: 0.001")
    assert [part for part in parts if part not in page] == []
    assert "optimizer.momentum" in table and "(kind sgd)" in table
    assert "train.steps" in run("explain", "train", code=0).out
    found = run("explain", "train.max_norm", "--json", code=0).data
    assert (found["type"], found["default"], found["required"]) == ("number > 0 | null", 1.0, False)
    assert len(run("explain", "--json", code=0).data) > 50


@cases(
    "key, meant",
    ("lr", "optimizer.lr"),
    ("optimizer.rl", "optimizer.lr"),
    ("optmizer", "optimizer"),
    ("momentun", "optimizer.momentum"),
    ("train.global-batch", "train.global_batch"),
    ("train.max_nrm", "train.max_norm"),
)
def test_explain_of_an_unknown_key(key: str, meant: str, run: Command) -> None:
    assert f"unknown key '{key}'; did you mean '{meant}'?" in run("explain", key, code=2).err
    run("explain", "verify.ranks", code=0)  # an old name


@cases("argv", [], ["check"], ["show"], ["schema"], ["explain"])
def test_help_has_examples(argv: list[str], run: Command) -> None:
    assert "examples:\n  fsdp2 spec" in run(*argv, "--help", code=0).out

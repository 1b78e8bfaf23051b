"""Recipes: whole, formatted, without a name that nothing binds, and of the options that were asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from verified_fsdp2.skill import cli, recipes
from verified_fsdp2.verifier.rules import RULES

NAMES = sorted(recipes.RECIPES)


def test_each_is_whole_and_formatted(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(recipes.text(name))
    for words in (["check", "--select", "F,I,B,UP,SIM"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", "--line-length", "88", "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_what_it_is_cut_for_and_nothing_of_the_project(name: str) -> None:
    assert set(recipes.RECIPES[name].rules) <= set(RULES)
    tree = ast.parse(recipes.text(name))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {wanted for _, wanted in recipes.RECIPES[name].wanted} <= defined
    taken = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not taken & {"distributed", "data", "model", "optim", "runs", "checkpoint", "metrics", "train", "export"}


def test_options_are_those_of_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", "train-step", "--set", "train.max_norm=null"]) == 0
    assert "clip_grad_norm_" not in capsys.readouterr().out
    assert cli.main(["recipe", "train-step"]) == 0
    assert "clip_grad_norm_" in capsys.readouterr().out
    assert cli.main(["recipe", "optimizer", "--set", "optimizer.kind=sdg"]) == 2
    assert "did you mean 'sgd'" in capsys.readouterr().err


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == list(recipes.RECIPES)
    assert cli.main(["recipe", "nothing"]) == 2
    assert "known: init-distributed" in capsys.readouterr().err

"""Recipes: whole, formatted, without a name that nothing binds, and of the options that were asked
for.
"""

import ast
from pathlib import Path

import pytest

from scripts import Command, python
from verified_fsdp2.skill import recipes
from verified_fsdp2.verifier.rules import RULES

NAMES = sorted(recipes.RECIPES)


def test_each_is_whole_and_formatted(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(recipes.text(name))
    for words in (["check", "--select", "F,I,B,UP,SIM"], ["format", "--diff"]):
        python(
            "-m",
            "ruff",
            *words,
            "--isolated",
            "--no-cache",
            "--line-length",
            "88",
            ".",
            cwd=tmp_path,
        )


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_what_it_is_cut_for_and_nothing_of_the_project(name: str) -> None:
    assert set(recipes.RECIPES[name].rules) <= set(RULES)
    tree = ast.parse(recipes.text(name))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {wanted for _, wanted in recipes.RECIPES[name].wanted} <= defined
    taken = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not taken & {
        "distributed",
        "data",
        "model",
        "optim",
        "runs",
        "checkpoint",
        "metrics",
        "train",
        "export",
    }


def test_options_are_those_of_a_spec(command: Command) -> None:
    assert (
        "clip_grad_norm_"
        not in command("recipe", "train-step", "--set", "train.max_norm=null", code=0).out
    )
    assert "clip_grad_norm_" in command("recipe", "train-step", code=0).out
    assert (
        "did you mean 'sgd'"
        in command("recipe", "optimizer", "--set", "optimizer.kind=sdg", code=2).err
    )


def test_names(command: Command) -> None:
    lines = command("recipe", code=0).out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(recipes.RECIPES)
    assert "known: init-distributed" in command("recipe", "nothing", code=2).err

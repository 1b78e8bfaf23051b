"""Each recipe, pasted into two foreign scripts and fitted to their names, passes the whole verification.

A file in tests/recipes/ is an edit of a right script, as in tests/faults/; a line `# fsdp2 recipe NAME ...` stands for what that
command prints.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from corpus import TESTS, Case, load
from verified_fsdp2.skill import recipes

pytestmark = pytest.mark.launch
PASTED = sorted((TESTS / "recipes").glob("*.yaml"))
COMMAND = re.compile(r"^# fsdp2 recipe (.+)$", re.MULTILINE)


def printed(command: re.Match[str]) -> str:
    name, *options = shlex.split(command[1])
    assert set(options[::2]) <= {"--set"}
    return recipes.text(name, options[1::2])


def pasted(path: Path) -> Case:
    case = load(path)
    return replace(case, edits=tuple({**edit, "new": COMMAND.sub(printed, edit["new"])} for edit in case.edits))


def test_each_recipe_is_pasted_into_two_scripts() -> None:
    used = Counter(shlex.split(command[1])[0] for path in PASTED for command in COMMAND.finditer(path.read_text()))
    assert used.keys() <= recipes.RECIPES.keys()
    assert {name for name in recipes.RECIPES if used[name] < 2} == set()


@pytest.mark.parametrize("path", PASTED, ids=lambda path: path.stem)
def test_it_passes(verify_case, path: Path) -> None:
    case = pasted(path)
    verdict = verify_case(case)
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status == "fail"] == []
    names = {shlex.split(command[1])[0] for command in COMMAND.finditer(path.read_text())}
    judged = {f.rule for f in verdict.findings if f.status == "pass"}
    assert {rule for name in names for rule in recipes.RECIPES[name].rules} - judged == set()

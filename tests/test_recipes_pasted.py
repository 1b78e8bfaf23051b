"""Each recipe, pasted into two foreign scripts and fitted to their names, passes the whole
verification.

A file in tests/recipes/ is an edit of a right script, as in tests/faults/; a line `# fsdp2 recipe
NAME ...` stands for what that command prints.
"""

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from corpus import TESTS, Case, load
from verified_fsdp2.skill import recipes

PASTED = sorted((TESTS / "recipes").glob("*.yaml"))
COMMAND = re.compile(r"^# fsdp2 recipe (.+)$", re.MULTILINE)


def printed(command: re.Match[str]) -> str:
    name, *options = shlex.split(command[1])
    assert set(options[::2]) <= {"--set"}
    return recipes.text(name, options[1::2])


def used(case: Case) -> set[str]:
    return {
        shlex.split(command[1])[0]
        for edit in case.edits
        for command in COMMAND.finditer(edit["new"])
    }


def test_each_recipe_is_pasted_into_two_scripts() -> None:
    hosts = {(name, case.host) for case in map(load, PASTED) for name in used(case)}
    assert {
        name: count for name, count in Counter(name for name, _ in hosts).items() if count < 2
    } == {}
    assert {name for name, _ in hosts} == recipes.RECIPES.keys()


@pytest.mark.full
@pytest.mark.parametrize("path", PASTED, ids=lambda path: path.stem)
def test_it_passes(verify_case, path: Path) -> None:
    case = load(path)
    edits = tuple({**edit, "new": COMMAND.sub(printed, edit["new"])} for edit in case.edits)
    verdict = verify_case(replace(case, edits=edits))
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status == "fail"] == []
    judged = {f.rule for f in verdict.findings if f.status in ("pass", "not_applicable")}
    assert {rule for name in used(case) for rule in recipes.RECIPES[name].rules} - judged == set()

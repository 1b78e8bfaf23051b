"""The cases of the history exam and of the threads were chosen before, and can be read."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from exam import scripts
from field_exam import table

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HISTORY = BENCHMARKS / "history"
ROUNDS = sorted(BENCHMARKS.glob("*/round*"))
LONGEST = 250  # lines of a script; its fault may be a few lines longer or shorter


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((folder / "cases.yaml").read_text("utf-8"))
    return found


@pytest.mark.parametrize("folder", ROUNDS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_the_scripts_of_a_round(folder: Path, tmp_path: Path) -> None:
    """Each is a script and its fault, and the line that the case names is one of what differs."""
    for script in scripts(folder):
        text = script.copy(tmp_path / f"{script.case}-{script.kind}").read_text("utf-8")
        ast.parse(text)
        assert 80 <= len(text.splitlines()) <= LONGEST + 10, script.case
        if script.kind == "fault":
            assert 1 <= script.about["line"] <= len(text.splitlines())
            assert script.about["fault"] and script.about["fix"] and script.about["proof"]


def test_the_cases_of_the_histories_stand_in_the_lists() -> None:
    """Nobody picks what is found: a case is the next candidate that qualifies."""
    for folder in HISTORY.glob("round*"):
        decided = yaml.safe_load((HISTORY / f"decided_{folder.name}.yaml").read_text("utf-8"))
        taken = {
            answer: (repository, commit)
            for repository, answers in decided.items()
            for commit, answer in answers.items()
        }
        for name, case in cases(folder).items():
            repository, commit = taken[name]
            assert (case["repository"], str(case["commit"])) == (repository, str(commit)), name
            listed = HISTORY / "candidates" / f"{repository.replace('/', '+')}.txt"
            lines = listed.read_text("utf-8").splitlines()
            order = [line.split(" ", 1)[0] for line in lines]
            read = [str(one)[:10] for one in decided[repository]]
            assert read == order[: len(read)], repository


def test_the_threads_stand_in_their_list() -> None:
    threads = BENCHMARKS / "threads"
    listed = yaml.safe_load((threads / "list.yaml").read_text("utf-8"))
    for folder in threads.glob("round*"):
        for name, case in cases(folder).items():
            assert re.fullmatch(rf"taken: {name}", listed[case["thread"]]["decided"]), name


def test_the_readme_and_the_reference_lead_with_the_figures() -> None:
    root = BENCHMARKS.parent
    for file in (root / "README.md", root / "references" / "reliability.md"):
        text = file.read_text("utf-8")
        assert "\n".join(table()) in text, file.name
        assert len(table()) - 2 <= 8

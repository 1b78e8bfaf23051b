"""CONTRIBUTING.md and the word list: what they show is in the code."""

import subprocess
from pathlib import Path

import yaml

from documents import BLOCK
from word_list import hits

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_diffs_are_of_the_code_as_it_is() -> None:
    diffs = [text for kind, text in BLOCK.findall(GUIDE) if kind == "diff"]
    assert len(diffs) == 7 and len(GUIDE.splitlines()) <= 220
    code = ""
    for line in "".join(diffs).splitlines():
        if line.startswith("+++ b/"):
            code = (ROOT / line.removeprefix("+++ b/")).read_text(encoding="utf-8")
        else:
            assert "".join(line.removeprefix("+").split()) in "".join(code.split())


def test_every_target_is_in_the_help_and_runs_what_hooks_run() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert [line.split()[0] for line in shown.splitlines()] == phony
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
        "repos"
    ]
    assert repo["repo"] == "local" and {hook["language"] for hook in repo["hooks"]} == {"system"}
    for hook in repo["hooks"]:
        assert hook["entry"].replace(".venv/bin", "$(BIN)").removeprefix("make ") in makefile


def test_the_word_list_finds_words_and_not_parts_of_words() -> None:
    assert hits("a.md", "We amended it.\nMend it, as meant.") == [
        "a.md:2: Mend -> fix",
        "a.md:2: as meant -> expected",
    ]

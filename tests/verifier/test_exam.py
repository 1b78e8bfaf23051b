"""The kept scripts of the exam: their faults fail the rules that find them today, their right
scripts fail none.

`make test` only reads them; `make test-all` verifies each with the defaults, as
`benchmarks/exam.py` does.
"""

from pathlib import Path

import pytest
from exam import ROUNDS, SETTINGS, Script, history, judge, scripts

from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.rules import RULES

KEPT = [script for folder in sorted(ROUNDS.glob("round*")) for script in scripts(folder)]
KEYS = {
    "kept",
    "kind",
    "fails",
    "once_failed",
    "fails_wrongly",
    "fault",
    "why_right",
    "proof",
    "edits",
    "folder",
    "exam_kind",
    "first_sight",
    *SETTINGS,
}


def name(script: Script) -> str:
    return f"{script.folder.parent.name}/{script.case}-{script.kind}"


@pytest.mark.parametrize("script", KEPT, ids=name)
def test_kept_script_can_be_judged(script: Script, tmp_path: Path) -> None:
    about = script.about
    assert about["kept"] and set(about) <= KEYS
    assert {*about.get("fails", ()), *about.get("once_failed", ())} <= set(RULES)
    assert bool(about.get("edits")) == (about["kind"] == "fault")
    # a fault that begins late or is switched off may be named only, or not be seen at all
    assert bool(about.get("fails")) == (about["kind"] == "fault") or "exam_kind" in about
    assert about.get("exam_kind", "late") in ("late", "hidden", "caught", "world")
    assert about.get("first_sight", "found") in ("found", "named", "inconclusive", "silent")
    compile(script.copy(tmp_path / "project").read_text(encoding="utf-8"), name(script), "exec")


def test_every_folder_is_a_kept_case() -> None:
    here = {path.parent for path in ROUNDS.rglob("*.py") if "__pycache__" not in path.parts}
    assert {script.folder for script in KEPT} == here


@pytest.mark.full
@pytest.mark.parametrize("script", KEPT, ids=name)
def test_kept_script(launcher: Launcher, script: Script) -> None:
    """A twin that never failed is judged by the rules of its fault, which must not fail it."""
    about = script.about
    by_all = script.kind == "right" or (script.kind == "twin" and "once_failed" in about)
    row = judge(script, launcher, () if by_all else about.get("fails", ()))
    assert row["verdict"] != "error", row["evidence"]
    if script.kind == "fault":
        assert set(about.get("fails", ())) <= set(row["failed"])
    else:
        assert row["failed"] == about.get("fails_wrongly", []), row["evidence"]


def test_a_commit_that_the_clone_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="git fetch --unshallow"):
        history("0" * 40, tmp_path)

"""The pairwise sample of specs: what was run, and, behind the mark `slow`, running it (pytest -m slow: about half an hour)."""

import json
from pathlib import Path
from typing import Any

import pytest

import pairwise

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
ROWS: list[dict[str, Any]] = json.loads((RESULTS / "pairwise.json").read_text(encoding="utf-8"))["rows"]


def test_all_that_was_run_passed() -> None:
    assert len(ROWS) >= 40
    passed = [row["verdict"] == "pass" and not row["findings"] and row["linted"] for row in ROWS]
    assert [row["combination"] for row, right in zip(ROWS, passed, strict=True) if not right] == []


@pytest.mark.slow
def test_the_sample_is_that_of_the_specs_of_today(tmp_path: Path) -> None:
    pairwise.make_files(tmp_path)
    held = pairwise.pairs([row["combination"] for row in ROWS])
    assert pairwise.possible_pairs(tmp_path) - held == set()


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("number", range(1, len(ROWS) + 1))
def test_a_combination(tmp_path: Path, number: int) -> None:
    pairwise.make_files(tmp_path)
    found = pairwise.verified(number, ROWS[number - 1]["combination"], tmp_path)
    assert (found["verdict"], found["findings"], found["linted"]) == ("pass", [], True)

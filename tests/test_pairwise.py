"""The pairwise sample of specs: what was run, and, behind the mark `slow`, running it (pytest -m
slow: about half an hour).
"""

import json
from pathlib import Path
from typing import Any

import pytest

import pairwise

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SAMPLE: dict[str, Any] = json.loads((RESULTS / "pairwise.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = SAMPLE["rows"]
COMBINATIONS = [pairwise.complete(row["combination"]) for row in ROWS]


def test_all_that_was_run_passed() -> None:
    assert len(ROWS) >= 44
    passed = [row["verdict"] == "pass" and not row["findings"] and row["linted"] for row in ROWS]
    assert [row["combination"] for row, right in zip(ROWS, passed, strict=True) if not right] == []


def test_most_pairs_were_run() -> None:
    assert 0.7 * SAMPLE["possible"] <= SAMPLE["pairs"] <= SAMPLE["possible"]
    assert (
        len(pairwise.pairs(COMBINATIONS)) >= SAMPLE["pairs"]
    )  # some are refused with the first setting of the others


@pytest.mark.slow
def test_the_sample_counts_the_pairs_of_today(tmp_path: Path) -> None:
    pairwise.make_files(tmp_path)
    possible = pairwise.possible_pairs(tmp_path)
    assert (len(possible), len(possible & pairwise.pairs(COMBINATIONS))) == (
        SAMPLE["possible"],
        SAMPLE["pairs"],
    )


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("number", range(1, len(ROWS) + 1))
def test_a_combination(tmp_path: Path, number: int) -> None:
    pairwise.make_files(tmp_path)
    found = pairwise.verified(number, ROWS[number - 1]["combination"], tmp_path)
    assert (found["verdict"], found["findings"], found["linted"]) == ("pass", [], True)

"""Every two features of the scaffold together: few are refused, each for a reason that torch or a
package gives, and what was run of the others passed.
"""

import json
from pathlib import Path

import feature_pairs
import pytest

import pairwise

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "feature_pairs.json"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    folder = tmp_path_factory.mktemp("pairs")
    pairwise.make_files(folder)
    found = {pair: feature_pairs.refusal(pair, folder) for pair in feature_pairs.pairs()}
    return {pair: why for pair, why in found.items() if why}


def test_few_pairs_are_refused(refused: dict[tuple[str, str], str]) -> None:
    assert len(feature_pairs.pairs()) == 136
    assert len(refused) <= 8, refused


def test_what_was_run_passed(refused: dict[tuple[str, str], str]) -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    passed = [
        tuple(row["pair"])
        for row in found["rows"]
        if row["linted"] and row["verdict"] == "pass" and not row["findings"]
    ]
    assert len(passed) == len(found["rows"]) > 0
    assert not {*passed} & {*refused}

"""The benchmark that measures recall: its statistics and its cases."""

from pathlib import Path

import pytest

from corpus import faults, load, right
from detection import read
from detection_table import table, wilson


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    # Figures of the Wilson score interval without continuity correction: Newcombe, Statistics in
    # Medicine 17 (1998), Table I.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(hits: int, total: int, low: float, high: float) -> None:
    assert wilson(hits, total) == pytest.approx((low, high), abs=5e-5)


def test_every_case_can_be_made(tmp_path: Path) -> None:
    for case in [*faults(), *right()]:
        assert case.target(tmp_path / case.name).exists()
        assert case.files()


def test_an_edit_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    case = load(next(case.path for case in faults() if case.edits))
    broken = type(case)(
        case.path, case.rule, case.host, edits=({"old": "this stands nowhere", "new": ""},)
    )
    with pytest.raises(ValueError, match="stands 0 times"):
        broken.target(tmp_path)


def test_the_table_names_what_was_missed() -> None:
    results = read(Path(__file__).parents[1] / "benchmarks" / "results" / "corpus.json")
    first = next(row for row in results["rows"] if row["rule"])
    row = {
        **first,
        "case": "faults/x",
        "rule": "r",
        "found": False,
        "first": "other",
        "failed": ["other"],
    }
    page = table({**results, "rows": [row]})
    assert "| faults found | 0 of 1 |" in page
    assert "`faults/x` (r): the report says other" in page

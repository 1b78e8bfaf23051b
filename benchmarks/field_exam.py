"""The figures of the exam of the field, from its results: the table of README.md.

    python benchmarks/field_exam.py

A fault is found if it fails a rule that its right twin does not fail; named: the first finding says
what to edit and where, as a reader judged it (`named` in benchmarks/results/*_roundN.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SETS = {
    "history": "faults that public trainers had and fixed, as scripts",
    "history_in_place": "the same, in the trainer's own code",
    "threads": "public bug reports, as scripts",
    "papers": "faults of the papers TrainCheck and TTrace, as scripts",
}


def rows_of(name: str, number: int) -> list[dict[str, Any]]:
    """The rows of a round; none where it was not judged."""
    path = RESULTS / f"{name}_round{number}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    assert isinstance(found, list)
    return found


def figures(rows: list[dict[str, Any]]) -> tuple[int, int, int, int, int]:
    """(faults, found, named, passed although wrong, right twins that failed), without cases whose
    right twin is wrong itself (`not_right`).
    """
    left_out = {row["case"] for row in rows if "not_right" in row}
    rows = [row for row in rows if row["case"] not in left_out]
    twins = {row["case"]: row for row in rows if row["kind"] == "twin"}
    faults = [row for row in rows if row["kind"] == "fault" and row["case"] in twins]
    found = [row for row in faults if {*row["failed"]} - {*twins[row["case"]]["failed"]}]
    named = [row for row in found if row.get("named")]
    passed = [row for row in faults if row["verdict"] == "pass"]
    failed = [row for row in twins.values() if row["verdict"] == "fail"]
    return len(faults), len(found), len(named), len(passed), len(failed)


def rounds() -> list[int]:
    """The rounds that were judged."""
    numbers = range(1, 4)
    return [number for number in numbers if any(rows_of(name, number) for name in SETS)]


def table() -> list[str]:
    """The lines of all rounds: each cell has one figure for each round."""
    known = [f"round {number}" for number in rounds()]
    lines = [
        f"| held against, at first sight ({', '.join(known)}) | found | first finding names it"
        " | passed | right failed |",
        "|---|---|---|---|---|",
    ]
    for name, words in SETS.items():
        all_rows = [rows for number in rounds() if (rows := rows_of(name, number))]
        cells = zip(*(_cells(rows) for rows in all_rows), strict=True)
        lines.append(f"| {words} | {' | '.join(', '.join(cell) for cell in cells)} |")
    stepped, true = zip(*(_strangers(number) for number in rounds()), strict=True)
    who = f"strangers' repositories: {', '.join(stepped)} made a step"
    lines.append(f"| {who} | {', '.join(true)} findings true | | | |")
    return lines


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    faults, *numbers = figures(rows)
    return [f"{number} of {faults}" for number in numbers]


def _strangers(number: int) -> tuple[str, str]:
    """(how many repositories made a step, how many findings are true)."""
    repositories = rows_of("strangers", number)
    judged = [one["true"] for row in repositories for one in row["findings"]]
    names = {row["repository"] for row in repositories}
    stepped = {row["repository"] for row in repositories if row["steps"]}
    return f"{len(stepped)} of {len(names)}", f"{sum(judged)} of {len(judged)}"


if __name__ == "__main__":
    print("\n".join(table()))

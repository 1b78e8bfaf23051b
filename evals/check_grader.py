"""Is the grader right?

Right solutions pass; every untouched start and every seeded wrong solution fails as foreseen.

    # all tasks: half an hour
    python evals/check_grader.py --out benchmarks/results/grader.json
    # tasks whose name contains this
    python evals/check_grader.py --only single-gpt
    # these rows anew, the others kept
    python evals/check_grader.py --only single-gpt --out benchmarks/results/grader.json

A wrong solution fails for the right reason if the checks that fail are exactly those that its task
names; where a run is to end with an error, the task also names words of that error, or several,
where it depends on timing which rank is first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from grade import SECONDS, grade, run_oracle
from grader.oracle import Oracle
from grader.tasks import Task, load, names

KINDS = {
    "solution": "reference solutions",
    "right": "other right solutions",
    "start": "untouched starts",
    "wrong": "wrong solutions",
}


def foreseen(task: Task, variant: str) -> dict[str, Any]:
    """The checks that have to fail, words that have to be said, and why."""
    kind, _, name = variant.partition("/")
    if kind == "start":
        return {
            "fails": task.values["start"],
            "says": task.values.get("start_says"),
            "why": "untouched",
        }
    reported = {"right": task.right, "wrong": task.wrong}[kind][name] if name else {}
    return {
        "fails": reported.get("fails", []),
        "says": reported.get("says"),
        "why": reported.get("why", ""),
    }


def examine(task: Task, variant: str, slow: float, known: tuple[Path, Oracle]) -> dict[str, Any]:
    """Grade one variant of a task: a row of the table."""
    expected = foreseen(task, variant)
    with tempfile.TemporaryDirectory() as folder:
        result = grade(task, task.write(variant, Path(folder) / "repository"), slow, known)
    failed = {
        check["name"]: check["detail"] for check in result["checks"] if check["passed"] is False
    }
    says = [expected["says"]] if isinstance(expected["says"], str) else expected["says"] or [""]
    said = not failed or any(words in detail for words in says for detail in failed.values())
    right = (
        result["passed"] == (not expected["fails"])
        and sorted(failed) == sorted(expected["fails"])
        and said
    )
    row = {
        "task": task.name,
        "variant": variant,
        "why": expected["why"],
        "passed": result["passed"],
        "failed": failed,
    }
    return {
        **row,
        "as_foreseen": right,
        "checks": len(result["checks"]),
        "seconds": result["seconds"],
    }


def show(row: dict[str, Any]) -> None:
    name = f"{row['task']} {row['variant']}"
    result = "ok" if row["as_foreseen"] else "WRONG"
    failed = " ".join(row["failed"])
    print(f"{result:<6}{name:<60}{row['seconds']:>5} s  {failed}", flush=True)
    if not row["as_foreseen"]:
        for check, detail in row["failed"].items():
            print(f"          {check:<26}{detail}", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind how many there are, how many came out as foreseen, and the longest time."""
    result: dict[str, Any] = {"tasks": len({row["task"] for row in rows})}
    for kind in KINDS:
        own = [row for row in rows if row["variant"].partition("/")[0] == kind]
        result[kind] = {"graded": len(own), "as_foreseen": sum(row["as_foreseen"] for row in own)}
    result["longest_seconds"] = max(row["seconds"] for row in rows)
    return result


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument(
        "--slow", type=float, default=1.0, metavar="N", help="N times the time, for a busy machine"
    )
    return parser


def others(path: Path, graded: list[Task], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the other tasks in the file that is there, if they were made in the same
    environment.
    """
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    if results["environment"] != environment:
        raise SystemExit(f"{path} is of another environment: {results['environment']}")
    known = {row["task"] for row in results["rows"]} & set(names()) - {task.name for task in graded}
    return [row for row in results["rows"] if row["task"] in known]


def write_summary(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Store the numbers and one line a row, which names the checks that failed."""
    lines = [
        json.dumps({**row, "failed": sorted(row["failed"])}, ensure_ascii=False) for row in rows
    ]
    numbers = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rest = ' "rows": [\n  ' + ",\n  ".join(lines) + "\n ]"
    path.write_text("{\n" + ",\n".join([*numbers, rest]) + "\n}\n", encoding="utf-8")


def main() -> int:
    options = parser().parse_args()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    environment = {**versions, "platform": platform.platform(), "cores": os.cpu_count()}
    tasks = [load(name) for name in names() if options.only in name]
    kept = others(options.out, tasks, environment) if options.out and options.only else []
    rows = []
    for task in tasks:
        with tempfile.TemporaryDirectory() as name:
            known = (
                Path(name),
                run_oracle(task, Path(name), time.monotonic() + SECONDS * options.slow),
            )
            for variant in task.variants:
                rows.append(examine(task, variant, options.slow, known))
                show(rows[-1])
    if not rows:
        parser().error(f"no task's name contains {options.only}")
    rows = sorted([*rows, *kept], key=lambda row: names().index(row["task"]))
    numbers = summary(rows)
    print(f"{numbers['tasks']} tasks, the longest grading {numbers['longest_seconds']} s")
    for kind, label in KINDS.items():
        print(f"{label:<24}{numbers[kind]['as_foreseen']} of {numbers[kind]['graded']} as foreseen")
    if options.out:
        write_summary(options.out, {"environment": environment, **numbers}, rows)
    return 0 if all(row["as_foreseen"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

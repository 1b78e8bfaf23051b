"""Is the grader right? Every reference solution passes, every untouched start and every seeded wrong solution fails as foreseen.

    python evals/check_grader.py --out benchmarks/results/evals.json     # all tasks: some minutes
    python evals/check_grader.py --only single-gpt                       # tasks whose name contains this

A wrong solution fails for the right reason if the checks that fail are exactly those that its task names; where a run is to
end with an error, the task also names words of that error.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from grade import grade
from grader.tasks import load, names


def failing(result: dict[str, Any]) -> list[str]:
    return [row["name"] for row in result["checks"] if row["passed"] is False]


def examine(name: str) -> list[dict[str, Any]]:
    """One row for the solution, the start and each wrong solution of a task."""
    task, rows = load(name), []
    variants: list[tuple[str, list[str], str]] = [("solution", [], "")]
    variants.append(("start", task.values["start"], task.values.get("start_says", "")))
    variants += [("wrong/" + key, told["fails"], told.get("says", "")) for key, told in task.wrong.items()]
    for variant, foreseen, says in variants:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "repository"
            if variant == "solution":
                task.write_solution(into)
            elif variant == "start":
                task.write_start(into)
            else:
                task.write_wrong(variant.removeprefix("wrong/"), into)
            result = grade(task, into)
        failed = failing(result)
        said = any(says in check["detail"] for check in result["checks"])
        as_foreseen = result["passed"] == (variant == "solution") and sorted(failed) == sorted(foreseen) and said
        row = {
            "task": name,
            "variant": variant,
            "passed": result["passed"],
            "failed": failed,
            "as_foreseen": as_foreseen,
        }
        rows.append({**row, "seconds": result["seconds"], "checks": result["checks"]})
        print(
            f"{'ok' if as_foreseen else 'WRONG':<6}{name + ' ' + variant:<52}{result['seconds']:>5} s  {' '.join(failed)}",
            flush=True,
        )
        if not as_foreseen:
            for check in result["checks"]:
                print(f"          {check['passed']!s:<6}{check['name']:<26}{check['detail']}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, int | float]:
    """The numbers of the table."""
    result: dict[str, int | float] = {}
    for kind in ("solution", "start", "wrong"):
        own = [row for row in rows if row["variant"].startswith(kind)]
        result[kind + "s"] = len(own)
        result[kind + "s_as_foreseen"] = sum(row["as_foreseen"] for row in own)
    result["longest_seconds"] = max(row["seconds"] for row in rows)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    options = parser.parse_args()
    rows = [row for name in names() if options.only in name for row in examine(name)]
    numbers = summary(rows)
    print(json.dumps(numbers))
    if options.out:
        environment = {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform()}
        text = json.dumps({"environment": environment, **numbers, "rows": rows}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(row["as_foreseen"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Write evals.json from the tasks, or a repository of a task.

    python evals/write.py json                          # evals/evals.json anew
    python evals/write.py start TASK FOLDER             # what the agent is given
    python evals/write.py solution TASK FOLDER          # the reference solution
    python evals/write.py wrong TASK/NAME FOLDER        # a seeded wrong solution
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grade import sentences
from grader.tasks import EVALS, load, names, negatives


def one_line(text: str) -> str:
    return " ".join(text.split())


def evals() -> dict[str, Any]:
    """evals.json: skill-creator's format, with `name` and `should_trigger` besides."""
    rows: list[dict[str, Any]] = []
    for name in names():
        task = load(name)
        row = {
            "prompt": one_line(task.values["prompt"]),
            "expected_output": one_line(task.values["expected"]),
            "files": [path.relative_to(EVALS.parent).as_posix() for path in task.files()],
            "expectations": sentences(task),
        }
        rows.append({"id": len(rows) + 1, "name": name, **row, "should_trigger": True})
    for told in negatives():
        row = {
            "prompt": one_line(told["prompt"]),
            "expected_output": "The skill does not trigger: " + one_line(told["why"]),
            "files": [],
            "expectations": ["The skill is not used"],
        }
        rows.append({"id": len(rows) + 1, "name": told["name"], **row, "should_trigger": False})
    return {"skill_name": "verified-fsdp2", "evals": rows}


def main(argv: list[str]) -> int:
    match argv:
        case ["json"]:
            (EVALS / "evals.json").write_text(json.dumps(evals(), indent=2) + "\n", encoding="utf-8")
        case ["start", name, folder]:
            load(name).write_start(Path(folder))
        case ["solution", name, folder]:
            load(name).write_solution(Path(folder))
        case ["wrong", both, folder]:
            name, _, wrong = both.partition("/")
            load(name).write_wrong(wrong, Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Write evals.json from the tasks, a repository of a task, or its request.

python evals/write.py json                             # evals/evals.json anew
python evals/write.py prompt TASK                      # what the agent is asked
python evals/write.py start TASK FOLDER                # what the agent is given
python evals/write.py solution TASK FOLDER             # the reference solution
python evals/write.py wrong/NAME TASK FOLDER  # a seeded wrong solution; right/NAME: a right one
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
    """evals.json in the format of the Agent Skills evaluation guide, with `name` and
    `should_trigger` besides.
    """
    rows: list[dict[str, Any]] = []
    for name in names():
        task = load(name)
        row = {
            "prompt": task.values["prompt"].strip(),
            "expected_output": one_line(task.values["expected"]),
            "files": [path.relative_to(EVALS.parent).as_posix() for path in task.files()],
            "assertions": sentences(task),
        }
        rows.append({"id": len(rows) + 1, "name": name, **row, "should_trigger": True})
    for reported in negatives():
        row = {
            "prompt": reported["prompt"].strip(),
            "expected_output": "The skill does not trigger: " + one_line(reported["why"]),
            "files": [],
            "assertions": ["The skill is not used"],
        }
        rows.append({"id": len(rows) + 1, "name": reported["name"], **row, "should_trigger": False})
    return {"skill_name": "verified-fsdp2", "evals": rows}


def main(argv: list[str]) -> int:
    match argv:
        case ["json"]:
            (EVALS / "evals.json").write_text(
                json.dumps(evals(), indent=2) + "\n", encoding="utf-8"
            )
        case ["prompt", name] if name in names():
            print(load(name).values["prompt"].strip())
        case [variant, name, folder] if name in names() and variant in load(name).variants:
            if Path(folder).exists():
                print(f"{folder} is there already", file=sys.stderr)
                return 2
            load(name).write(variant, Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

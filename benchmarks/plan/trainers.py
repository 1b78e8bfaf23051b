"""What does a plan say of public trainers, unmodified?

Each is tried with the data and arguments of benchmarks/field.

    python benchmarks/plan/trainers.py --checkouts DIR [--environments DIR] [--only NAME,NAME]

The folders are those of benchmarks/field.py. benchmarks/results/plan_field.json has the newest row
of each: the exit code of `fsdp2 plan`, and what stopped it, where it was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for field and results_file

from field import HERE, Ready, checked_out, entry_of, python_of

from results_file import write

RESULT = Path(__file__).parents[1] / "results" / "plan_field.json"
LIMIT = 420


def said(ready: Ready) -> dict[str, Any]:
    """What the plan says of a trainer."""
    target, args = ready.command
    options = ready.options
    ranks = options[options.index("--nproc") + 1] if "--nproc" in options else "2"
    target = [".", *target] if target[0] == "-m" else target
    fsdp2 = [
        ready.python,
        str(HERE.parents[1] / "skill"),
        "plan",
        *target,
        "--nproc",
        ranks,
        "--steps",
        "2",
        "--json",
    ]
    started = time.monotonic()
    settings = os.environ | {
        key: str(value) for key, value in ready.settings["environment"].items()
    }
    done = subprocess.run(
        [*fsdp2, "--timeout", str(LIMIT), "--", *args],
        cwd=ready.root,
        env=settings,
        capture_output=True,
        text=True,
    )
    row = {"exit": done.returncode, "seconds": round(time.monotonic() - started, 1)}
    if not done.stdout.startswith("{"):
        return {**row, "said": done.stderr.strip().rpartition("\n")[2][:200]}
    plan = json.loads(done.stdout)
    trouble = plan["trouble"] or {}
    return {
        **row,
        "peak": plan["peak"],
        **{name: str(trouble[name])[:200] for name in trouble if trouble[name]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    kept = (
        {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
        if RESULT.is_file()
        else {}
    )
    for path in sorted(HERE.glob("*.yaml")):
        entry = entry_of(path)
        folder = options.checkouts / entry.get("checkout", entry["name"])
        if options.only and entry["name"] not in options.only.split(","):
            continue
        row = {"name": entry["name"], "commit": entry["commit"][:12]}
        if trouble := entry.get("not_run") or checked_out(entry, folder):
            row["not_run"] = trouble
        else:
            with tempfile.TemporaryDirectory(prefix="fsdp2-field-") as name:
                ready = Ready(
                    entry, folder, python_of(entry, options.environments), Path(name, "data")
                )
                ready.data.mkdir()
                ready.prepare()
                row |= said(ready)
        kept[entry["name"]] = row
        print(json.dumps(row), flush=True)
        write(RESULT, {"rows": sorted(kept.values(), key=lambda one: one["name"].lower())})


if __name__ == "__main__":
    main()

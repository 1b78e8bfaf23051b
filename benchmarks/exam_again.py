"""Scripts of past rounds of the exam, judged again: is what was found still found, and does a right script fail?

    python benchmarks/exam_again.py --seconds 3600

Takes scripts by chance, first those that were never judged again, and adds a line for each to build/exam_again.jsonl. The results say
for each round what came out; the last line of a script counts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from exam import judge, new_failures, scripts

from results_file import write
from verified_fsdp2.verifier.launch.client import Launcher

ROOT = Path(__file__).resolve().parents[1]
ROWS, OUT = ROOT / "build" / "exam_again.jsonl", ROOT / "benchmarks" / "results" / "exam_again.json"
Key = tuple[int, str, str]  # round, case, kind
Rows = dict[Key, dict[str, Any]]


def every_script() -> dict[Key, tuple[Path, dict[str, Any]]]:
    rounds = {int(folder.name.removeprefix("round")): folder for folder in (ROOT / "tests" / "exam").glob("round*")}
    found = ((number, *one) for number, folder in sorted(rounds.items()) for one in scripts(folder))
    return {(number, case, kind): (script, settings) for number, case, kind, script, settings in found}


def first_sight() -> Rows:
    found: Rows = {}
    for number in {key[0] for key in every_script()}:
        path = OUT.with_name(f"exam_round{number}.json")
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found |= {(number, row["case"], row["kind"]): row for row in rows}
    return found


def judged_again() -> Rows:
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    return {(row["round"], row["case"], row["kind"]): row for row in map(json.loads, lines)}


def outcome(row: dict[str, Any], rows: Rows) -> str:
    """found, missed; passed, inconclusive, failed."""
    if row["kind"] != "fault":
        return {"pass": "passed", "fail": "failed"}.get(row["verdict"], "inconclusive")
    twins = [one for key, one in rows.items() if key == (row["round"], row["case"], "twin")]
    return "found" if new_failures(row, twins) else "missed"


def summary(rows: Rows, first: Rows) -> dict[str, Any]:
    """Counts, what each round's scripts came to, and the rows that are not as one wants them."""
    twins = {key: {**row, "round": key[0]} for key, row in first.items()} | rows
    came = {key: outcome(row, twins) for key, row in rows.items()}
    before = [key for key in rows if key[2] == "fault" and first[key]["new"]]
    right = [key for key in rows if key[2] != "fault"]
    rounds = []
    for number in sorted({key[0] for key in rows}):
        names = {key: f"{key[1]} {key[2]}".removesuffix(" fault").removesuffix(" right") for key in rows}
        kinds = ("found", "missed", "passed", "inconclusive", "failed")
        of = {kind: sorted(names[key] for key in rows if key[0] == number and came[key] == kind) for kind in kinds}
        rounds.append({"round": number, **of})
    return {
        "of": len(every_script()),
        "commits": sorted({row["commit"] for row in rows.values()}),
        "found_before": {"of": len(before), "found_again": sum(came[key] == "found" for key in before)},
        "right": {
            "of": len(right),
            **{kind: sum(came[key] == kind for key in right) for kind in ("failed", "inconclusive")},
        },
        "rounds": rounds,
        "rows": [rows[key] for key in sorted(rows) if came[key] in ("missed", "failed", "inconclusive")],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="how long scripts are judged; 0: none, only the results are made"
    )
    parser.add_argument("--only", default="", help="cases whose name begins with one of these, by comma")
    options = parser.parse_args()
    known, every, ends = judged_again(), every_script(), time.monotonic() + options.seconds
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    named = [key for key in every if key[1].startswith(tuple(options.only.split(",")))]
    chosen = sorted(named, key=lambda key: (key in known, random.random()))
    ROWS.parent.mkdir(exist_ok=True)
    with Launcher() as launcher, ROWS.open("a", encoding="utf-8") as lines:
        for number, case, kind in chosen:
            if time.monotonic() > ends:
                break
            found = judge(*every[number, case, kind], launcher)
            row = {"round": number, "case": case, "kind": kind, "commit": commit, **found}
            print(json.dumps(row), file=lines, flush=True)
            print(f"{kind:<6}{row['verdict']:<13}{number:>3} {case:<40}{row['first']}", flush=True)
    results = summary(judged_again(), first_sight())
    write(OUT, results)
    print(json.dumps({key: value for key, value in results.items() if key not in ("rounds", "rows")}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How the verifier does on scripts whose authors knew none of its rules.

    python benchmarks/exam.py tests/exam/round1 --out benchmarks/results/exam_round1.json

A case is a folder with a case.yaml (`kind: fault` or `right`, `save_args`, `resume_args`, what is
wrong and how its author proved it) and `right/train.py`; a fault has `wrong/train.py` too, which
differs from its right twin in as few lines as possible. Each script is verified with the defaults
and these arguments; a case that turned out to be wrong itself (`not_right`: why) is left out. A
fault is found if it fails a rule that its twin does not fail (a warning is no failure); a right
script whose verdict is `fail` is a false alarm. `named`: the first such finding says what to
change, as a reader judged it. A round counts once, at first sight: what is published is measured
before anything is changed for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from detection_table import wilson
from results_file import write
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.rules import RULES


def scripts(folder: Path) -> list[tuple[str, str, Path, dict[str, Any]]]:
    """(case, kind, script, settings) of a round; kind is "fault", "twin" or "right"."""
    found = []
    for about in sorted(folder.glob("*/case.yaml")):
        case = yaml.safe_load(about.read_text(encoding="utf-8"))
        if "not_right" in case:
            continue
        settings = {
            key: case[key] for key in ("save_args", "resume_args", "args", "nproc") if case.get(key)
        }
        kinds = (
            {"wrong": "fault", "right": "twin"} if case["kind"] == "fault" else {"right": "right"}
        )
        for name, kind in kinds.items():
            found.append((about.parent.name, kind, about.parent / name / "train.py", settings))
    return found


def judge(
    script: Path, settings: dict[str, Any], launcher: Launcher, only: Collection[str] = ()
) -> dict[str, Any]:
    """The row of one script; `only`: the rules that are judged, without them all."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(script.parent, Path(place) / "project")) / script.name
        try:
            verdict = verify_with(
                launcher, resolve(copy, settings), Path(place) / "work", select(only, ())
            )
        except Exception as error:  # of the script's arguments, or of ours: a result too
            return {
                "verdict": "error",
                "first": "",
                "failed": [],
                "evidence": f"{type(error).__name__}: {error}"[:300],
            }
    failed = [f for f in verdict.findings if f.status == "fail" and f.required]
    first = next((f for f in failed if not f.consequence), failed[0] if failed else None)
    return {
        "verdict": verdict.verdict,
        "first": first.rule if first else "",
        "evidence": first.evidence[:300] if first else "",
        "line": first.location.line if first and first.location else None,
        "failed": [f.rule for f in failed],
        "warned": [f.rule for f in verdict.findings if f.warns],
        "inconclusive": [f.rule for f in verdict.findings if f.status == "inconclusive"],
        "seconds": round(verdict.seconds, 1),
    }


def share(part: int, whole: int) -> dict[str, Any]:
    """A share with its 95 % interval."""
    if not whole:
        return {"of": 0}
    return {
        "number": part,
        "of": whole,
        "share": round(part / whole, 3),
        "interval": [round(x, 3) for x in wilson(part, whole)],
    }


def new_failures(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The rules that a wrong script fails and its right twin does not."""
    twin = next(
        (r for r in rows if r["kind"] == "twin" and r["case"] == row["case"]), {"failed": []}
    )
    return [rule for rule in row["failed"] if rule not in twin["failed"]]


def summary(
    rows: list[dict[str, Any]], versions: dict[str, Any], named: list[str]
) -> dict[str, Any]:
    """The published figures of a round."""
    faults = [row for row in rows if row["kind"] == "fault"]
    good = [row for row in rows if row["kind"] != "fault"]
    return {
        "environment": {**versions, "platform": platform.platform(), "cores": os.cpu_count()},
        "found": share(sum(bool(new_failures(row, rows)) for row in faults), len(faults)),
        "named": share(sum(row["case"] in named for row in faults), len(faults)),
        "false_alarms": share(sum(row["verdict"] == "fail" for row in good), len(good)),
        "right_inconclusive": share(
            sum(row["verdict"] in ("inconclusive", "error") for row in good), len(good)
        ),
        "rows": [
            {**row, "new": new_failures(row, rows)} if row["kind"] == "fault" else row
            for row in rows
        ],
    }


def by_law(rounds: list[list[dict[str, Any]]]) -> list[str]:
    """Markdown rows: a law, the faults that fail it, those that fail only laws and comparisons,
    right scripts that fail it.
    """
    laws = {name for name, rule in RULES.items() if rule.family == "laws"}
    general = laws | {name for name, rule in RULES.items() if rule.family == "parity"}
    rows = [row for rows in rounds for row in rows]
    found = {law: [set(row["new"]) for row in rows if law in row.get("new", ())] for law in laws}
    wrong = {
        law: sum(row["kind"] != "fault" and law in row["failed"] for row in rows) for law in laws
    }
    met = sorted(
        (law for law in laws if found[law] or wrong[law]), key=lambda law: (-len(found[law]), law)
    )
    return [
        f"| {x} | {len(found[x])} | {sum(new <= general for new in found[x])} | {wrong[x]} |"
        for x in met
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("round", type=Path, help="the folder of a round")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--named", default="", help="cases whose first finding names what to change, by comma"
    )
    options = parser.parse_args()
    rows = []
    with Launcher(wish=wish(temporary("runs"))) as launcher:
        for case, kind, script, settings in scripts(options.round):
            if options.only in case:
                rows.append({"case": case, "kind": kind, **judge(script, settings, launcher)})
                print(
                    f"{kind:<6}{rows[-1]['verdict']:<13}{case:<40}{rows[-1]['first']}:"
                    f" {rows[-1]['evidence']}",
                    flush=True,
                )
        results = summary(rows, launcher.versions, options.named.split(","))
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1))
    if options.out:
        write(options.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

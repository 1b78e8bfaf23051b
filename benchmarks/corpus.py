"""How often the verifier is right: every seeded fault and every right script of the tests, through the whole verifier.

    python benchmarks/corpus.py --out benchmarks/results/corpus.json

A fault is found if the rule that its header names fails. A right script with any failing rule is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
from pathlib import Path

from verified_fsdp2.verifier.flow import select, verify_with
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.target import resolve

TESTS = Path(__file__).resolve().parents[1] / "tests"
KEYS = "rule|steps|nproc|args|save_args|resume_args|single_args|reshard_to|timeout"


def header(script: Path) -> dict[str, str]:
    """The `key: value` lines of a corpus script's docstring."""
    doc = script.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    return {m[1]: m[2] for m in re.finditer(rf"^({KEYS}): (.*)$", doc, re.M)}


def judge(script: Path, launcher: Launcher) -> dict[str, object]:
    """One line of the table."""
    told = header(script)
    rule = told.pop("rule", None)
    with tempfile.TemporaryDirectory() as work:
        verdict = verify_with(launcher, resolve(script, told), Path(work) / "work", select((), ()))
    failed = [f.rule for f in verdict.findings if f.status == "fail"]
    return {
        "script": f"{script.parent.name}/{script.name}",
        "rule": rule,
        "found": rule in failed if rule else None,
        "failed": failed,
        "consequences": [f.rule for f in verdict.findings if f.status == "fail" and f.consequence],
        "inconclusive": [f.rule for f in verdict.findings if f.status == "inconclusive"],
        "seconds": round(verdict.seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    scripts = [*sorted((TESTS / "faults").glob("*.py")), *sorted((TESTS / "zoo").glob("*.py"))]
    rows = []
    with Launcher() as launcher:
        for script in scripts:
            row = judge(script, launcher)
            rows.append(row)
            state = {True: "found", False: "MISSED", None: "FALSE ALARM" if row["failed"] else "quiet"}[row["found"]]
            print(f"{state:<12}{row['script']:<52}{row['seconds']:>6} s  {', '.join(row['failed'])}", flush=True)
        versions = launcher.versions
    faults = [row for row in rows if row["rule"]]
    right = [row for row in rows if not row["rule"]]
    missed = [row for row in faults if not row["found"]]
    alarms = [row for row in right if row["failed"]]
    summary = {
        "environment": {**versions, "platform": platform.platform()},
        "faults": len(faults),
        "found": len(faults) - len(missed),
        "right_scripts": len(right),
        "false_alarms": len(alarms),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }
    print(
        f"{summary['found']} of {summary['faults']} faults found, {len(alarms)} false alarms on {len(right)} right scripts"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())

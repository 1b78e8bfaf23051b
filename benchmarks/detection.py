"""How often the verifier is right: every seeded fault and every right script, through the whole verifier.

    python benchmarks/detection.py --out benchmarks/results/corpus.json [--only NAME]

A fault is found if its rule fails. A right script with any failing rule is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from corpus import Case, faults, right
from verified_fsdp2.verifier.flow import select, verify_with
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.target import resolve


def judge(case: Case, launcher: Launcher) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        target = resolve(case.target(Path(folder)), case.settings)
        chosen = select((), (), case.tier)
        verdict = verify_with(launcher, target, Path(folder) / "work", chosen, tier=case.tier)
    failed = [f for f in verdict.findings if f.status == "fail"]
    causes = [f.rule for f in failed if not f.consequence]
    return {
        "case": case.name,
        "rule": case.rule,
        "found": case.rule in [f.rule for f in failed] if case.rule else None,
        "first": causes[0] if causes else (failed[0].rule if failed else None),
        "failed": [f.rule for f in failed],
        "consequences": [f.rule for f in failed if f.consequence],
        "inconclusive": [f.rule for f in verdict.findings if f.status == "inconclusive"],
        "evidence": {f.rule: f.evidence for f in failed},
        "seconds": round(verdict.seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--only", help="cases whose name contains this")
    options = parser.parse_args()
    cases = [case for case in [*faults(), *right()] if not options.only or options.only in case.name]
    rows = []
    with Launcher() as launcher:
        for case in cases:
            row = judge(case, launcher)
            rows.append(row)
            state = {True: "found", False: "MISSED", None: "FALSE ALARM" if row["failed"] else "quiet"}[row["found"]]
            print(f"{state:<12}{row['case']:<52}{row['seconds']:>6} s  {', '.join(row['failed'])}", flush=True)
        versions = launcher.versions
    seeded = [row for row in rows if row["rule"]]
    good = [row for row in rows if not row["rule"]]
    missed = [row for row in seeded if not row["found"]]
    alarms = [row for row in good if row["failed"]]
    summary = {
        "environment": {**versions, "platform": platform.platform()},
        "faults": len(seeded),
        "found": len(seeded) - len(missed),
        "right_scripts": len(good),
        "false_alarms": len(alarms),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }
    print(
        f"{summary['found']} of {summary['faults']} faults found, {len(alarms)} false alarms on {len(good)} right scripts"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())

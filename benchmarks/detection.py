"""How often the verifier is right: every seeded fault and every right script, through the whole
verifier.

    python benchmarks/detection.py --out benchmarks/results/corpus.json --table \\
        references/reliability.md

A fault is found if its rule fails, or a rule that its case names under `also`, or one that only
compares (with DDP, one process, the run that went on); it is named if its own rule is the first
failure of the report. A right script with any failing rule is a false alarm; right scripts run on
1, 2 and 4 ranks, or on the number that their header asks for. To save time a fault runs without
resume where its rule needs none, and right scripts reshard at 2 ranks only. `--only NAME` runs the
cases whose name contains it; `--from FILE` makes the table from stored results and runs nothing;
`--again FILE` keeps the correct rows of FILE and runs the others, new cases among them. `--out`
gets a summary (counts, one line a run); evidence and consequences go to `--details` (of a whole
run: build/detection.json, which git ignores). `--from` and `--again` read either file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from corpus import Case, faults, right
from detection_table import by_rule, in_page
from results_file import write
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace.roles import OF_CHECKPOINTS

ROOT = Path(__file__).resolve().parents[1]
DETAILS = ROOT / "build" / "detection.json"
BY_RULE = ROOT / "tests" / "faults" / "README.md"
COLUMNS = (
    "case",
    "rule",
    "tier",
    "silent",
    "strength",
    "kind",
    "ranks",
    "found",
    "first",
    "failed",
    "seconds",
)
OTHER_SIZES = (4, 1)
Job = tuple[Case, dict[str, Any]]


def jobs(only: str | None) -> list[Job]:
    """(case, settings) of every run: the faults once, then the right scripts at each world size
    that they can take.
    """
    todo: list[Job] = []
    for case in faults():
        assert case.rule is not None
        rule = RULES[case.rule]
        resumed = rule.family == "checkpoint" or (rule.needs | rule.reads) & OF_CHECKPOINTS
        todo.append((case, case.settings if resumed else {**case.settings, "resume_args": ""}))
    todo += [
        (case, case.settings if case.fixed_size else {**case.settings, "nproc": 2})
        for case in right()
    ]
    for size in OTHER_SIZES:
        todo += [
            (case, {**case.settings, "nproc": size, "reshard_to": ""})
            for case in right()
            if not case.fixed_size
        ]
    return [job for job in todo if not only or only in job[0].name]


def counts(case: Case, rule: str) -> bool:
    """Whether a failure of this rule means that the case's fault was seen."""
    return rule == case.rule or rule in case.about.get("also", ()) or not RULES[rule].names_a_cause


def judge(
    case: Case,
    settings: dict[str, Any],
    launcher: Launcher,
    spelled: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """One row of the results. `spelled` makes another spelling of the script."""
    with tempfile.TemporaryDirectory() as folder:
        script = case.target(Path(folder))
        if spelled is not None:
            text = spelled(script.read_text(encoding="utf-8"))
            script = Path(folder, script.name)
            script.write_text(text, encoding="utf-8")
        target = resolve(script, settings)
        chosen = select((), (), case.tier)
        verdict = verify_with(launcher, target, Path(folder) / "work", chosen, tier=case.tier)
    failed = [f for f in verdict.findings if f.status == "fail"]
    causes = [f.rule for f in failed if not f.consequence]
    return {
        "case": case.name,
        "rule": case.rule,
        "tier": case.tier,
        "silent": case.silent,
        "strength": case.about.get("strength", 1.0),
        "kind": case.kind,
        "ranks": target.nproc,
        "found": any(counts(case, f.rule) for f in failed) if case.rule else None,
        "first": (causes or [f.rule for f in failed] or [None])[0],
        "failed": [f.rule for f in failed],
        "consequences": [f.rule for f in failed if f.consequence],
        "inconclusive": [f.rule for f in verdict.findings if f.status == "inconclusive"],
        "evidence": {f.rule: f.evidence for f in failed},
        "seconds": round(verdict.seconds, 1),
    }


def run(todo: list[Job], workers: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of all jobs, in order, and the versions on which they ran."""
    launchers: SimpleQueue[Launcher] = SimpleQueue()
    opened = [Launcher(wish=wish(temporary("runs"))).__enter__() for _ in range(workers)]
    for launcher in opened:
        launchers.put(launcher)

    def one(job: Job) -> dict[str, Any]:
        launcher = launchers.get()
        try:
            row = judge(*job, launcher)
        finally:
            launchers.put(launcher)
        state = {True: "found", False: "MISSED", None: "FALSE ALARM" if row["failed"] else "quiet"}[
            row["found"]
        ]
        print(
            f"{state:<12}{row['case']:<50}{row['ranks']:>3} ranks{row['seconds']:>6} s "
            f" {', '.join(row['failed'])}",
            flush=True,
        )
        return row

    try:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, todo)), opened[0].versions
    finally:
        for launcher in opened:
            launcher.__exit__(None, None, None)


def key(row: dict[str, Any]) -> tuple[str, int]:
    """What a row is of: the case, and for right scripts the number of ranks."""
    return row["case"], 0 if row["rule"] else row["ranks"]


def key_of(job: Job) -> tuple[str, int]:
    """The `key` of the row that a job gives."""
    case, settings = job
    return case.name, 0 if case.rule else resolve(case.path, settings).nproc


def summary(rows: list[dict[str, Any]], versions: dict[str, Any]) -> dict[str, Any]:
    """The results with all details."""
    seeded = [row for row in rows if row["rule"]]
    good = [row for row in rows if not row["rule"]]
    return {
        "environment": {**versions, "platform": platform.platform(), "cores": os.cpu_count()},
        "faults": len(seeded),
        "found": sum(row["found"] for row in seeded),
        "right_scripts": len({row["case"] for row in good}),
        "right_runs": len(good),
        "false_alarms": sum(bool(row["failed"]) for row in good),
        "median_seconds": statistics.median(row["seconds"] for row in rows) if rows else 0.0,
        "rows": rows,
    }


def stored(results: dict[str, Any]) -> dict[str, Any]:
    """The summary that is committed: rows are lists in the order of COLUMNS."""
    return {
        **{name: value for name, value in results.items() if name != "rows"},
        "missed": [row["case"] for row in results["rows"] if row["rule"] and not row["found"]],
        "false_alarm_cases": [
            row["case"] for row in results["rows"] if not row["rule"] and row["failed"]
        ],
        "columns": COLUMNS,
        "rows": [[row[name] for name in COLUMNS] for row in results["rows"]],
    }


def read(path: Path) -> dict[str, Any]:
    """Results with rows as dicts, of the details or of the summary, which has no evidence."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if columns := results.pop("columns", None):
        results["rows"] = [dict(zip(columns, row, strict=True)) for row in results["rows"]]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the summary as JSON")
    parser.add_argument("--details", type=Path, help="write every row with its evidence as JSON")
    parser.add_argument(
        "--table", type=Path, help="the document whose last section shows the results"
    )
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument(
        "--from", dest="given", type=Path, help="read the results from this file and run nothing"
    )
    parser.add_argument(
        "--again", type=Path, help="keep the correct results of this file and run the others"
    )
    parser.add_argument("--workers", type=int, default=1, help="verifications at a time")
    options = parser.parse_args()
    if options.given:
        results = read(options.given)
    elif options.again:
        good = {
            key(row): row
            for row in read(options.again)["rows"]
            if row["found"] or (row["rule"] is None and not row["failed"])
        }
        todo = jobs(options.only)
        rows, versions = run([job for job in todo if key_of(job) not in good], options.workers)
        rows = [*good.values(), *rows]
        order = {key_of(job): place for place, job in enumerate(todo)}
        results = summary(
            sorted((r for r in rows if key(r) in order), key=lambda r: order[key(r)]), versions
        )
    else:
        results = summary(*run(jobs(options.only), options.workers))
    if options.details or not (options.given or options.only):
        write(options.details or DETAILS, results)
    if options.out:
        write(options.out, stored(results))
    if options.table:
        page = options.table.read_text(encoding="utf-8")
        options.table.write_text(in_page(page, results), encoding="utf-8")
        BY_RULE.write_text(by_rule(results), encoding="utf-8")
    print(
        f"{results['found']} of {results['faults']} faults found, {results['false_alarms']} false"
        f" alarms on {results['right_scripts']} right scripts in {results['right_runs']} runs"
    )
    return 1 if results["found"] < results["faults"] or results["false_alarms"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Scripts of past rounds of the exam, judged again: is what was found still found, and does a right
script fail?

    python benchmarks/exam_again.py --seconds 3600 --jobs 2 --from   # every one, from the history
    python benchmarks/exam_again.py --seconds 3600 --jobs 2           # the kept ones

Takes scripts by chance, first those that were never judged again, and of these the faults that had
been found. Such a fault is judged by the rule that named it, and by all rules only if that does not
find it; right scripts are judged by all. `--from COMMIT` reads scripts and rows at first sight from
a commit, by default the last one that holds them all. build/exam_again.json says for each round
what came out; what is judged now takes the place of what stands there. `--publish FILE` puts its
totals into the page of figures.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import Process, Queue
from pathlib import Path
from typing import Any

from exam import ROOT, ROUNDS, WHOLE, Script, history, judge, new_failures, scripts

from results_file import write
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.rules import RULES

OUT = ROOT / "build" / "exam_again.json"
OF_FAULTS, OF_RIGHT = ("found", "missed"), ("passed", "inconclusive", "failed")
Key = tuple[int, str, str]  # round, case, kind
Rows = dict[Key, dict[str, Any]]
Cases = dict[Key, tuple[Script, str]]  # and the rule that found it


def every_script(folder: Path) -> dict[Key, Script]:
    rounds = {int(path.name.removeprefix("round")): path for path in folder.glob("round*")}
    found = (
        (number, script) for number, path in sorted(rounds.items()) for script in scripts(path)
    )
    return {(number, script.case, script.kind): script for number, script in found}


def first_sight(results: Path, rounds: set[int]) -> Rows:
    """The rows of whole rounds, as they were published."""
    found: Rows = {}
    for number in rounds:
        rows = json.loads((results / f"exam_round{number}.json").read_text(encoding="utf-8"))[
            "rows"
        ]
        found |= {(number, row["case"], row["kind"]): row for row in rows}
    return found


def as_kept(every: dict[Key, Script]) -> Rows:
    """In the place of those rows: the rules that find a kept fault."""
    rules = {
        key: script.about["fails"] if key[2] == "fault" else [] for key, script in every.items()
    }
    return {
        key: {"new": found, "first": (found or [""])[0], "failed": []}
        for key, found in rules.items()
    }


def stored(results: dict[str, Any]) -> dict[Key, str]:
    """{script: what it came to} of results."""
    found: dict[Key, str] = {}
    for row in results.get("rounds", ()):
        for came in (*OF_FAULTS, *OF_RIGHT):
            for name in row[came]:
                case, _, twin = name.partition(" ")
                found[row["round"], case, "fault" if came in OF_FAULTS else twin or "right"] = came
    return found


def outcome(key: Key, row: dict[str, Any], twin: dict[str, Any]) -> str:
    if key[2] != "fault":
        return {"pass": "passed", "fail": "failed"}.get(row["verdict"], "inconclusive")
    return (
        "found"
        if new_failures({**row, "case": key[1]}, [{**twin, "case": key[1], "kind": "twin"}])
        else "missed"
    )


def rule_of(row: dict[str, Any]) -> str:
    """The rule that named a fault at first sight, which its twin does not fail; "" where none
    did.
    """
    new = row.get("new") or [""]
    return row["first"] if row["first"] in new else new[0]


def work(cases: Cases, ends: float, rows: Queue[Any]) -> None:
    """One process: puts a (script, row) for each script, and None at its end."""
    try:
        with Launcher(wish=wish(temporary("runs"))) as launcher:
            for key, (script, rule) in cases.items():
                if time.monotonic() > ends:
                    break
                row = judge(script, launcher, [rule]) if rule in RULES else {"failed": []}
                rows.put((key, row if row["failed"] else judge(script, launcher)))
    finally:
        rows.put(None)


def judged(cases: Cases, jobs: int, ends: float) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Rows in the order in which they are ready, of so many scripts at a time."""
    rows: Queue[Any] = Queue()
    for job in range(jobs):
        Process(target=work, args=(dict(list(cases.items())[job::jobs]), ends, rows)).start()
    while jobs:
        if (row := rows.get()) is None:
            jobs -= 1
        else:
            yield row


def summary(
    came: dict[Key, str], details: Rows, commits: list[str], of: int, first: Rows
) -> dict[str, Any]:
    """Counts, what each round's scripts came to, and the rows that are not as one wants them."""
    before = [key for key in came if key[2] == "fault" and first[key]["new"]]
    right = [came[key] for key in came if key[2] != "fault"]
    rounds = []
    for number in sorted({key[0] for key in came}):
        names = {
            key: f"{key[1]} {key[2]}".removesuffix(" fault").removesuffix(" right") for key in came
        }
        kinds = (*OF_FAULTS, *OF_RIGHT)
        own = {
            kind: sorted(names[key] for key in came if key[0] == number and came[key] == kind)
            for kind in kinds
        }
        rounds.append({"round": number, **own})
    return {
        "of": of,
        "commits": commits,
        "found_before": {
            "of": len(before),
            "found_again": sum(came[key] == "found" for key in before),
        },
        "right": {
            "of": len(right),
            **{kind: right.count(kind) for kind in ("failed", "inconclusive")},
        },
        "rounds": rounds,
        "rows": [
            details[key]
            for key in sorted(details)
            if came[key] in ("missed", "failed", "inconclusive")
        ],
    }


def again(options: argparse.Namespace, every: dict[Key, Script], first: Rows) -> None:
    """Judge scripts until the time is over; each row is stored at once."""
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    came = {key: value for key, value in stored(results).items() if key in every}
    details = {(row["round"], row["case"], row["kind"]): row for row in results.get("rows", ())}
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True
    ).strip()
    commits = sorted({*results.get("commits", ()), commit})
    named = [key for key in every if key[1].startswith(tuple(options.only.split(",")))]
    order = sorted(
        named,
        key=lambda key: (
            key in came,
            not first[key].get("new"),
            key[2] == "fault",
            random.random(),
        ),
    )
    cases = {key: (every[key], rule_of(first[key])) for key in order}
    for key, row in judged(cases, options.jobs, time.monotonic() + options.seconds):
        came[key] = outcome(key, row, first.get((*key[:2], "twin"), {"failed": []}))
        details[key] = {"round": key[0], "case": key[1], "kind": key[2], "commit": commit, **row}
        print(f"{came[key]:<13}{key[2]:<6}{key[0]:>3} {key[1]:<40}{row['first']}", flush=True)
        write(options.out, summary(came, details, commits, len(every), first))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, required=True, help="how long scripts are judged")
    parser.add_argument("--jobs", type=int, default=1, help="how many scripts at a time")
    parser.add_argument(
        "--from",
        dest="commit",
        nargs="?",
        const=WHOLE,
        help="whole rounds, as this commit has them",
    )
    parser.add_argument(
        "--only", default="", help="cases whose name begins with one of these, by comma"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="what was judged before, and is stored again"
    )
    parser.add_argument("--publish", type=Path, help="put the totals into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as past:
        if options.commit:
            folder = history(options.commit, Path(past))
            every = every_script(folder / "tests" / "exam")
            again(
                options,
                every,
                first_sight(folder / "benchmarks" / "results", {key[0] for key in every}),
            )
        else:
            every = every_script(ROUNDS)
            again(options, every, as_kept(every))
    if not options.out.exists():
        raise SystemExit("no script was judged in this time")
    results = json.loads(options.out.read_text(encoding="utf-8"))
    totals = {key: value for key, value in results.items() if key not in ("rounds", "rows")}
    print(json.dumps(totals, indent=1))
    if options.publish:
        write(
            options.publish,
            {**json.loads(options.publish.read_text(encoding="utf-8")), "again": totals},
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

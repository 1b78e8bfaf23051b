"""Right scripts of the corpora to their end, plain and below the guard: no breach, the same bits.

    python benchmarks/guard/right_scripts.py --out benchmarks/results/guard_right_scripts.json

Each script of tests/zoo runs twice under torchrun with its own number of ranks and arguments. The
hash of all weights and optimizer states of each rank at the end must be the same; a script that
differs from itself without the guard is said to draw otherwise each time, and is not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from run import records, start  # noqa: E402

from corpus import Case, right  # noqa: E402
from machine import environment  # noqa: E402
from results_file import write  # noqa: E402

EVERY = 5
HASH = re.compile(r"HASH (rank \d+) (steps \d+) ([0-9a-f]{64})")


def command_of(case: Case, folder: Path, guarded: bool, name: str) -> list[str]:
    torchrun = Path(sys.executable).with_name("torchrun")
    ranks = int(case.settings.get("nproc", 2))
    saves = str(case.settings.get("save_args", "")).replace("{checkpoint}", str(folder / name))
    arguments = str(case.settings.get("args", "")).replace("{checkpoint}", str(folder / name))
    command = [str(torchrun), "--standalone", "--nproc-per-node", str(ranks), str(case.path)]
    command += [*shlex.split(arguments), *shlex.split(saves)]
    if not guarded:
        return command
    watch = [sys.executable, "-m", "verified_fsdp2.skill", "guard", "--every", str(EVERY)]
    watch += ["--repeat", "1", "--out", str(folder / "guard.jsonl")]
    return [*watch, "--", *command]


def hashes(lines: list[str]) -> dict[str, str]:
    return {f"{rank} {steps}": found for rank, steps, found in HASH.findall("\n".join(lines))}


def compare(case: Case, timeout: float) -> dict[str, Any]:
    """The row of one script."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = start(command_of(case, folder, False, "plain"), timeout)
        guarded = start(command_of(case, folder, True, "guarded"), timeout)
        lines = records(folder)
        breaches = [line for line in lines if line.get("kind") == "breach"]
        same = hashes(plain.tail) == hashes(guarded.tail)
        again = None
        if not same:
            again = hashes(start(command_of(case, folder, False, "again"), timeout).tail)
    checks = [line["step"] for line in lines if line.get("kind") == "check"]
    return {
        "name": case.name,
        "status": [plain.status, guarded.status],
        "ranks": len(hashes(plain.tail)),
        "same_bits": same,
        "same_without": same or again == hashes(plain.tail),
        "checks": len(checks),
        "last_step": max(checks, default=0),
        "breaches": [[one["law"], one["step"], one["message"]] for one in breaches],
        "errors": [line["text"] for line in lines if line.get("kind") == "error"],
        "notes": [line["text"] for line in lines if line.get("kind") == "note"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    stepped = [row for row in rows if row["checks"]]
    return {
        "scripts": len(rows),
        "checked": len(stepped),
        "with_breaches": sum(bool(row["breaches"]) for row in rows),
        "with_errors_of_the_guard": sum(bool(row["errors"]) for row in rows),
        "other_bits": sum(not row["same_bits"] and row["same_without"] for row in rows),
        "other_bits_each_time": sum(not row["same_without"] for row in rows),
        "other_status": sum(len({*row["status"]}) > 1 for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run")
    options = parser.parse_args()
    os.environ["HASH_AT_END"] = "1"
    beside = str(HERE / "hash_at_end")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [beside, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )
    rows: list[dict[str, Any]] = []
    for case in right():
        if options.only not in case.name or not case.path.is_file():
            continue
        rows.append(compare(case, options.timeout))
        row = rows[-1]
        bits = "same bits" if row["same_bits"] else "OTHER BITS"
        print(f"{row['name']:44} {bits}, {row['checks']} checks {row['breaches'] or ''}"
              f" {row['errors'] or ''} {row['status']}", flush=True)  # fmt: skip
        if options.out:
            write(
                options.out,
                {"environment": environment(), "summary": summary(rows), "scripts": rows},
            )
    print(summary(rows))
    return int(
        any(row["breaches"] or (not row["same_bits"] and row["same_without"]) for row in rows)
    )


if __name__ == "__main__":
    raise SystemExit(main())

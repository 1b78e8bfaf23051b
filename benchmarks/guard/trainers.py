"""Public trainers, unmodified, for 500 steps, plain and below the guard: no breach, the same bits.

    python benchmarks/guard/trainers.py --checkouts DIR [--environments DIR] [--only NAME,NAME] \\
        [--out benchmarks/results/guard_trainers.json]

The trainers are those of `benchmarks/field/*.yaml` with a key `guard`: `arguments`, added to the
command, that make a run of 500 steps, and `rows` of data where it needs more of them. Both runs are
under torchrun with CUDA on the CPU (benchmarks/field/bare.py) and begin with the same data and no
output. The hash of all weights and optimizer states of each rank at the end must be the same; a
trainer that differs from itself without the guard is said so.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from field import HERE as FIELD  # noqa: E402
from field import Ready, entry_of, python_of  # noqa: E402
from right_scripts import hashes  # noqa: E402
from run import Ended, records, start  # noqa: E402

from machine import environment  # noqa: E402
from results_file import write  # noqa: E402

EVERY = 100


def variables_of(ready: Ready) -> dict[str, str]:
    """The trainer's environment, with the hash at the end of each process."""
    own = {key: str(value) for key, value in ready.settings["environment"].items()}
    paths = (str(HERE / "hash_at_end"), own.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    return own | {"HASH_AT_END": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def command_of(ready: Ready, guarded: bool) -> list[str]:
    """The trainer under torchrun, with or without the guard before it."""
    target, arguments = ready.command
    ranks = ready.options[ready.options.index("--nproc") + 1]
    command = [ready.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [ranks, str(FIELD / "bare.py"), *target, *arguments]
    command += map(ready.filled, shlex.split(ready.entry["guard"]["arguments"]))
    if not guarded:
        return command
    watch = [ready.python, str(HERE.parents[1] / "skill"), "guard", "--every", str(EVERY)]
    watch += ["--repeat", "1", "--out", str(ready.data.parent / "guard.jsonl")]
    return [*watch, "--", *command]


def run(ready: Ready, guarded: bool, timeout: float) -> Ended:
    """One run to its end, from the data as they were prepared."""
    shutil.rmtree(ready.data, ignore_errors=True)
    shutil.copytree(ready.data.with_name("prepared"), ready.data)
    ended = start(command_of(ready, guarded), timeout, ready.root, variables_of(ready))
    if ended.status or not hashes(ended.tail):
        print(f"{ready.entry['name']}: status {ended.status}", *ended.tail, sep="\n", flush=True)
    return ended


def compare(entry: dict[str, Any], folder: Path, python: str, timeout: float) -> dict[str, Any]:
    """The row of one trainer."""
    git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="fsdp2-guard-") as name:
        ready = Ready(entry, folder, python, Path(name, "data"))
        ready.data.mkdir()
        os.environ["FIELD_ROWS"] = str(entry["guard"].get("rows", 400))
        ready.prepare()
        ready.data.rename(ready.data.with_name("prepared"))
        plain, guarded = (run(ready, guard, timeout) for guard in (False, True))
        ends, lines = hashes(plain.tail), records(Path(name))
        same = bool(ends) and ends == hashes(guarded.tail)
        alike = same or ends == hashes(run(ready, False, timeout).tail)
    breaches = [line for line in lines if line.get("kind") == "breach"]
    checks = [line["step"] for line in lines if line.get("kind") == "check"]
    return {
        "name": entry["name"],
        "repository": entry["repository"],
        "commit": commit[:12],
        "steps": max((int(key.split()[-1]) for key in ends), default=0),
        "ranks": len(ends),
        "status": [plain.status, guarded.status],
        "seconds": [plain.seconds, guarded.seconds],
        "same_bits": same,
        "same_without": alike,
        "checks": len(checks),
        "last_step": max(checks, default=0),
        "breaches": [[one["law"], one["step"], one["message"]] for one in breaches],
        "errors": [line["text"] for line in lines if line.get("kind") == "error"],
        "notes": [line["text"] for line in lines if line.get("kind") == "note"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a run")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in sorted(FIELD.glob("*.yaml")):
        entry = entry_of(path)
        if "guard" not in entry or entry["name"] not in (options.only or entry["name"]).split(","):
            continue
        folder = options.checkouts / entry.get("checkout", entry["name"])
        python = python_of(entry, options.environments)
        rows.append(compare(entry, folder, python, options.timeout))
        print(rows[-1], flush=True)
        if options.out:
            write(options.out, {"environment": environment(), "trainers": rows})
    return int(any(row["breaches"] or row["errors"] or not row["same_bits"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

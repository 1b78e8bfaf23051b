"""What a verification of a public trainer costs, in plain runs of as many steps: time, processor
time and memory.

    python benchmarks/field_cost.py lingua --checkouts DIR [--environments DIR] [--steps-argument \\
        steps=5] [--repeats 3] [--out FILE]

The plain run is the trainer under torchrun with the verifier's CUDA on the CPU, without which it
does not start here, and nothing else of the verifier (benchmarks/field/bare.py). Plain, `--quick`
and full verifications take turns. Memory is what all processes of a command hold together (PSS,
looked at every 0.2 s), at its largest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from field import HERE, Ready, entry_of, python_of

from machine import environment
from results_file import text, write

KINDS = ("plain", "quick", "full")


def held(group: int) -> int:
    """KiB that the processes below one hold together."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(place.name)] = int(
                (place / "stat").read_text().rpartition(")")[2].split()[1]
            )
    below = {group}
    while more := {one for one, parent in parents.items() if parent in below} - below:
        below |= more
    total = 0
    for one in below:
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measured(command: list[str], ready: Ready) -> dict[str, float]:
    """Seconds, seconds of processor time, and MiB of one command."""
    settings = os.environ | {
        key: str(value) for key, value in ready.settings["environment"].items()
    }
    before, started, peak = os.times(), time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ready.root, env=settings, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, held(process.pid))
            time.sleep(0.2)
        if process.returncode not in (0, 1, 3, 4):  # verdicts
            log.seek(0)
            raise SystemExit(
                f"{shlex.join(command)}: exit {process.returncode}\n{log.read()[-2000:].decode()}"
            )
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {
        "seconds": time.monotonic() - started,
        "processor_seconds": used,
        "mebibytes": peak / 1024,
    }


def commands(ready: Ready, more: list[str]) -> dict[str, list[str]]:
    target, args = ready.command
    ranks = ready.options[ready.options.index("--nproc") + 1]
    torchrun = [
        ready.python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
    ]
    plain = [*args, *more]
    fsdp2 = [ready.python, str(HERE.parents[1] / "skill"), "verify", *target, *ready.options]
    return {
        "plain": [*torchrun, str(HERE / "bare.py"), *target, *plain],
        "quick": [*fsdp2, "--quick", "--", *args],
        "full": [*fsdp2, "--", *args],
    }


def measure(ready: Ready, more: list[str], repeats: int) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            for place in ready.data.iterdir():
                subprocess.run(["rm", "-rf", str(place)], check=True)
            ready.prepare()
            rows[kind].append(measured(commands(ready, more)[kind], ready))
            print(
                kind, {name: round(value, 1) for name, value in rows[kind][-1].items()}, flush=True
            )
    middle = {
        kind: {name: round(statistics.median(row[name] for row in found), 1) for name in found[0]}
        for kind, found in rows.items()
    }
    ratios = {
        kind: {
            name: round(value / middle["plain"][name], 2) for name, value in middle[kind].items()
        }
        for kind in KINDS[1:]
    }
    return {"repeats": repeats, "medians": middle, "in_plain_runs": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", help="the name of a YAML in benchmarks/field")
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    parser.add_argument(
        "--steps-argument",
        default="",
        help="arguments with which the plain run makes as many steps",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    entry = entry_of(HERE / f"{options.trainer}.yaml")
    folder = options.checkouts / entry.get("checkout", entry["name"])
    with tempfile.TemporaryDirectory(prefix="fsdp2-field-") as name:
        ready = Ready(entry, folder, python_of(entry, options.environments), Path(name, "data"))
        ready.data.mkdir()
        results = measure(ready, shlex.split(options.steps_argument), options.repeats)
    results = {
        "trainer": entry["name"],
        "commit": entry["commit"][:12],
        **results,
        "environment": environment(),
    }
    print(text(results))
    if options.out is not None:
        write(options.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

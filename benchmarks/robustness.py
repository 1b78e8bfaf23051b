"""The gate on malformed inputs, in hostile surroundings and interrupted: what it answers, how long
it takes, what it leaves behind.

    python benchmarks/robustness.py --out benchmarks/results/robustness.json

Five parts: malformed inputs (robustness_inputs.py), scripts that do what they should not
(robustness_scripts.py), damaged checkpoints, signals at random moments, and many verifications at a
time (robustness_signals.py). Every input comes from a fixed seed.

A trial is clean if the exit code is one of 0, 1, 2 and 4, nothing on stderr is a traceback, the
message is bounded, it ends within its limit, no process is left, and no file is written but below
`out`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write
from robustness_checkpoints import damage, make, resume
from robustness_inputs import KINDS, fresh
from robustness_processes import ended, fsdp2
from robustness_scripts import HOSTILE, NAMES, SAVING, SIMULATED, hostile
from robustness_signals import at_random_moments, in_parallel
from verified_fsdp2.skill.reports import FORMATS

GOOD_CODES = (0, 1, 2, 4)
LIMIT = 10.0  # seconds for an input that runs nothing
LINES, CHARACTERS = 151, 8_300  # what `bounded` leaves, and the usage before it


@dataclass(frozen=True)
class Trial:
    """What one input came to."""

    kind: str
    number: int
    argv: list[str]
    code: int | None
    seconds: float
    limit: float
    stderr: str
    leftovers: list[str]

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.stderr or self.code == 3

    @property
    def late(self) -> bool:
        return self.code is None or self.seconds > self.limit

    @property
    def flooded(self) -> bool:
        return len(self.stderr) > CHARACTERS or self.stderr.count("\n") > LINES

    @property
    def clean(self) -> bool:
        good = self.code in GOOD_CODES
        return good and not (self.traceback or self.late or self.flooded or self.leftovers)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What lies in a folder, but for `out`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split("/")[0] != "out" and "__pycache__" not in name:
            found[name] = (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


class Late(BaseException):
    """The time of a trial is over."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def over(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_process(kind: str, number: int, folder: Path, limit: float = LIMIT, seed: int = 0) -> Trial:
    """One input through `main`, in this process."""
    from verified_fsdp2.skill.cli import main

    fresh(folder)
    argv = KINDS[kind][0](random.Random(f"{seed} {kind} {number}"), folder)
    before, here = snapshot(folder), Path.cwd()
    out, err = io.StringIO(), io.StringIO()
    code: int | None = None
    started = time.monotonic()
    saved = tempfile.tempdir
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(limit):
            try:
                code = main(argv)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
    except Late:
        code = None
    finally:
        os.chdir(here)
        tempfile.tempdir = saved
    seconds = time.monotonic() - started
    return Trial(
        kind, number, argv, code, seconds, limit, err.getvalue(), changed(before, snapshot(folder))
    )


def row(kind: str, trials: list[Trial]) -> dict[str, Any]:
    """The line of one kind in the table."""
    codes = Counter(str(trial.code) for trial in trials)
    return {
        "kind": kind,
        "inputs": len(trials),
        "exit_codes": dict(sorted(codes.items())),
        "tracebacks": sum(trial.traceback for trial in trials),
        "over_time": sum(trial.late for trial in trials),
        "floods": sum(trial.flooded for trial in trials),
        "leftovers": sum(bool(trial.leftovers) for trial in trials),
        "longest_seconds": round(max(trial.seconds for trial in trials), 2),
    }


def described(trial: Trial) -> str:
    head = f"{trial.kind} {trial.number}: {trial.code} {trial.seconds:.1f} s {trial.leftovers[:5]}"
    return f"{head} {str(trial.argv)[:300]}\n{trial.stderr[-1500:]}"


def in_a_process(
    kind: str, number: int, argv: list[str], folder: Path, limit: float, own: tuple[str, ...] = ()
) -> Trial:
    """A command in a process of its own; `own` are files that a script may change because they are
    its own.
    """
    before = snapshot(folder)
    code, seconds, err, left = ended(fsdp2(argv), folder, limit)
    found = [
        name
        for name in changed(before, snapshot(folder))
        if name not in own and not name.startswith("tmp/torchind")
    ]
    return Trial(
        kind, number, argv, code, seconds, limit, err, [*found, *(f"process {pid}" for pid in left)]
    )


def malformed(folder: Path, seed: int) -> Iterator[tuple[str, list[Trial]]]:
    """Every kind in this process; of each some again in processes of their own."""
    for kind, (_, number) in KINDS.items():
        yield kind, [in_process(kind, n, folder, seed=seed) for n in range(number)]
    trials = []
    for kind, (written, _) in KINDS.items():
        for n in range(4):
            argv = written(random.Random(f"{seed} {kind} {n}"), fresh(folder))
            trials.append(in_a_process("a sample of these, in processes", n, argv, folder, 60.0))
    yield "a sample of these, in processes", trials


def scripts(folder: Path) -> Iterator[tuple[str, list[Trial]]]:
    """Hostile scripts and hostile names through the tiers that run them."""
    for tier, names in (("ranks", list(HOSTILE)), ("simulate", SIMULATED)):
        trials = []
        for n, name in enumerate(names):
            (fresh(folder) / "in" / "a.py").write_text(hostile(name), encoding="utf-8")
            saving = (
                [*SAVING, "--reshard-to", "1"]
                if tier == "ranks" and HOSTILE[name][0] == "SAVED"
                else []
            )
            argv = [
                "verify",
                "in/a.py",
                "--tier",
                tier,
                "--steps",
                "3",
                "--timeout",
                "15",
                *saving,
                "--report",
                "json=out/r.json",
            ]
            trials.append(in_a_process(name, n, argv, folder, 180.0, ("in/a.py",)))
        yield f"hostile script, --tier {tier}", trials
    trials = []
    for n, name in enumerate(NAMES):
        path = os.path.join(os.fsencode(fresh(folder) / "in"), name)  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(hostile("raises hostile text"))
        reports = [word for kind in FORMATS for word in ("--report", f"{kind}=out/r.{kind}")]
        script = os.path.join("in", os.fsdecode(name))  # noqa: PTH118
        argv = ["verify", script, "--timeout", "15", *reports]
        trials.append(in_a_process(str(name), n, argv, folder, 60.0))
    yield "hostile name of a script", trials


def checkpoints(folder: Path, number: int) -> Iterator[tuple[str, list[Trial]]]:
    """Damaged checkpoints before the `--resume` of a generated project."""
    run, trials = make(fresh(folder)), []
    for n in range(number):
        trial = fresh(folder / "trial")
        project = shutil.copytree(folder / "project", trial / "project")
        what = damage(random.Random(f"checkpoint {n}"), shutil.copytree(run, trial / "out" / "run"))
        code, seconds, err, left = ended(resume(trial / "out" / "run"), project, 120.0)
        trials.append(
            Trial(what, n, [], code, seconds, 120.0, err, [f"process {pid}" for pid in left])
        )
    yield "checkpoint for --resume of a generated project", trials


def table(parts: Iterator[tuple[str, list[Trial]]]) -> list[dict[str, Any]]:
    """A row for each kind; what is not clean is shown on stderr."""
    rows = []
    for kind, trials in parts:
        rows.append(row(kind, trials))
        print(rows[-1], flush=True)
        for trial in [trial for trial in trials if not trial.clean]:
            print(described(trial), file=sys.stderr)
    return rows


PARTS: dict[str, Callable[[Path, int], Any]] = {
    "inputs": lambda folder, seed: table(malformed(folder, seed)),
    "scripts": lambda folder, seed: table(scripts(folder)),
    "checkpoints": lambda folder, seed: table(checkpoints(folder, 24)),
    "signals": lambda folder, seed: at_random_moments(20, folder),
    "parallel": lambda folder, seed: in_parallel(50, 10, folder),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write the results as JSON; parts that are not run stay as they are",
    )
    parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="this part alone (repeatable)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the malformed inputs")
    options = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts this in the background has it ignored
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for part in options.part or PARTS:
            found[part] = PARTS[part](Path(name).resolve() / part, options.seed)
    if options.out:
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        results = {
            "environment": environment(),
            **{part: {**before, **found}.get(part) for part in PARTS},
        }
        write(options.out, results)
    return 0 if good(found) else 1


def good(results: dict[str, Any]) -> bool:
    """Whether every trial was clean, and nobody survived."""
    rows = [row for part in ("inputs", "scripts", "checkpoints") for row in results.get(part, ())]
    counts = [
        row[key] for row in rows for key in ("tracebacks", "over_time", "floods", "leftovers")
    ]
    codes = {code for row in rows for code in row["exit_codes"]}
    counts += [len(row["wrong"]) + row["survivors"] for row in results.get("signals", ())]
    if parallel := results.get("parallel"):
        counts += [parallel[key] for key in ("tracebacks", "survivors", "folders_left")]
    return not any(counts) and codes <= {str(code) for code in GOOD_CODES}


if __name__ == "__main__":
    raise SystemExit(main())

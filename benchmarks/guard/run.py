"""Seeded faults, bit flips and right variants of a training run below the run-time guard.

    python benchmarks/guard/run.py --kind faults --out benchmarks/results/guard_faults.json
    python benchmarks/guard/run.py --only NAME --without-guard      # plain torchrun, its speed

A fault is found if the guard reports a breach whose step is within [begin, begin + 2 * every] (a
hang: any breach), and named if one of these has the fault's law. A right variant must have none.
With `--cut` the last launch of a case ends three intervals after its first wrong step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cases import Facts, Launch, all_cases  # noqa: E402

from machine import environment  # noqa: E402
from results_file import write  # noqa: E402

MARK = "GUARD_CASE"
STEP_LINE = re.compile(r"^step (\d+) loss ")


@dataclass
class Ended:
    """How one launch went: exit status, seconds, the steps that it logged and when."""

    status: int = 0
    seconds: float = 0.0
    timed_out: bool = False
    logged: list[tuple[int, float]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    @property
    def steps_per_second(self) -> float:
        if len(self.logged) < 2:
            return 0.0
        (first, begun), (last, done) = self.logged[0], self.logged[-1]
        return round((last - first) / max(done - begun, 1e-9), 2)


def kill_marked(mark: str) -> None:
    """Kill what has this mark in its environment, since ranks have sessions of their own."""
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def start(
    command: Sequence[str],
    timeout: float,
    folder: Path = HERE,
    more: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command to its end or to the time limit; nothing that it started is left."""
    mark, ended, begun = uuid.uuid4().hex, Ended(), time.monotonic()
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | dict(more or {}) | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def stop() -> None:
        ended.timed_out = True
        kill_marked(mark)

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            ended.tail = [*ended.tail[-59:], line.rstrip()[:200]]
            if match := STEP_LINE.match(line):
                ended.logged.append((int(match[1]), time.monotonic()))
        ended.status = process.wait()
    finally:
        timer.cancel()
        kill_marked(mark)
    ended.seconds = round(time.monotonic() - begun, 1)
    return ended


def command_of(facts: Facts, number: int, launch: Launch, folder: Path, guard: bool) -> list[str]:
    """The command line of one launch; each but the first resumes."""
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--standalone", "--nproc-per-node", str(launch.world)]
    command += [str(HERE / "trainer.py"), "--case", facts.name, "--mesh", facts.mesh]
    command += ["--out", str(folder / "run"), *facts.flags]
    command += ["--kill-at" if launch.kill else "--stop-at", str(launch.until)]
    if number:
        command.append("--resume")
    if not guard:
        return command
    watch = [sys.executable, "-m", "verified_fsdp2.skill", "guard", "--every", str(facts.every)]
    return [*watch, "--out", str(folder / "guard.jsonl"), "--", *command]


def records(folder: Path) -> list[dict[str, Any]]:
    """What the guard has written: guard.jsonl and guard.rank*.jsonl."""
    found = []
    for path in sorted([*folder.glob("guard.jsonl"), *folder.glob("guard.rank*.jsonl")]):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
    return found


def launches_of(facts: Facts, cut: bool) -> list[Launch]:
    *others, last = facts.launches
    if cut and facts.kind != "right":
        until = min(last.until, facts.begin + 3 * facts.every + 10)
        last = Launch(last.world, until, last.kill)
    return [*others, last]


def run_case(facts: Facts, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every launch of a case, and what the guard reported of it."""
    ends: list[Ended] = []
    breaches: list[dict[str, Any]] = []
    launches = launches_of(facts, options.cut)
    for number, launch in enumerate(launches):
        command = command_of(facts, number, launch, folder, not options.without_guard)
        ends.append(start(command, options.timeout))
        for record in records(folder):
            if record.get("kind") == "breach" and record not in breaches:
                breaches.append(record)
    row = judged(facts, breaches)
    row["steps_per_second"] = [end.steps_per_second for end in ends]
    row["launches"] = [
        f"{launch.world} ranks to {launch.until}{', killed' * launch.kill}: status {end.status},"
        f" {end.seconds} s{', timed out' * end.timed_out}"
        for launch, end in zip(launches, ends, strict=True)
    ]
    row["complete"] = all(complete(facts, *pair) for pair in zip(launches, ends, strict=True))
    if not row["complete"]:
        row["tail"] = ends[-1].tail
    return row


def complete(facts: Facts, launch: Launch, end: Ended) -> bool:
    """Whether a launch got as far as it should; a hang should not get there."""
    if facts.law == "hang":
        return True
    reached = end.logged[-1][0] if end.logged else 0
    return reached >= launch.until // 50 * 50 and not end.timed_out


def judged(facts: Facts, breaches: list[dict[str, Any]]) -> dict[str, Any]:
    """A case's row of the results, by what was reported of it."""
    last = facts.begin + 2 * facts.every
    due = [
        breach
        for breach in breaches
        if facts.law == "hang" or facts.begin <= int(breach.get("step") or 0) <= last
    ]
    named = [breach for breach in due if breach.get("law") == facts.law]
    row: dict[str, Any] = {"name": facts.name, "kind": facts.kind, "law": facts.law}
    row |= {"mesh": facts.mesh, "begin": facts.begin, "every": facts.every}
    row |= {"found": bool(due), "named": bool(named), "breaches": len(breaches)}
    row["early"] = sum(int(breach.get("step") or 0) < facts.begin for breach in breaches)
    row["laws"] = sorted({str(breach.get("law")) for breach in breaches})
    if len(facts.ranks) < 8:
        ranks = {rank for breach in named for rank in breach.get("ranks") or ()}
        row["rank_named"] = bool(ranks & set(facts.ranks))
    if breaches:
        shown = (named or due or breaches)[0]
        row["first"] = {key: shown.get(key) for key in ("law", "step", "ranks", "names", "message")}
    return row


def line_of(row: dict[str, Any], guard: bool) -> str:
    speed = "/".join(map(str, row["steps_per_second"]))
    end = "" if row["complete"] else "  DID NOT GET TO ITS END"
    if not guard:
        return f"{row['name']:32} {speed} steps/s{end}"
    if row["kind"] == "right":
        verdict = "quiet" if not row["breaches"] else f"FALSE ALARM {','.join(row['laws'])}"
    else:
        verdict = "named" if row["named"] else "found" if row["found"] else "MISSED"
        verdict += f" ({','.join(row['laws'])})" if row["laws"] and not row["named"] else ""
    step = row.get("first", {}).get("step", "-")
    return f"{row['name']:32} {row['law']:24} {verdict}, step {step}, {speed} steps/s{end}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    seeded = [row for row in rows if row["kind"] != "right"]
    laws = sorted({(row["kind"], row["law"]) for row in seeded})
    counts: dict[str, Any] = {}
    for kind, law in laws:
        those = [row for row in seeded if (row["kind"], row["law"]) == (kind, law)]
        counts[f"{kind} {law}"] = {
            "cases": len(those),
            "found": sum(row["found"] for row in those),
            "named": sum(row["named"] for row in those),
        }
    right = [row for row in rows if row["kind"] == "right"]
    alarms = sum(row["breaches"] > 0 for row in right)
    return {**counts, "right": {"cases": len(right), "false_alarms": alarms}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("faults", "flips", "right"), default="")
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--without-guard", action="store_true", help="plain torchrun")
    parser.add_argument("--cut", action="store_true", help="end soon after the first wrong step")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a launch")
    parser.add_argument("--keep", type=Path, help="keep what the runs write below this folder")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for facts in all_cases(options.kind):
        if options.only not in facts.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = (options.keep.resolve() if options.keep else Path(folder)) / facts.name
            place.mkdir(parents=True, exist_ok=True)
            rows.append(run_case(facts, place, options))
        print(line_of(rows[-1], not options.without_guard), flush=True)
        if options.out:
            results = {"environment": environment(), "summary": summary(rows), "cases": rows}
            write(options.out, results)
    print(json.dumps(summary(rows)))
    good = all(row["breaches"] == 0 if row["kind"] == "right" else row["found"] for row in rows)
    return 0 if options.without_guard or good else 1


if __name__ == "__main__":
    raise SystemExit(main())

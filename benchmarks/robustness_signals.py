"""Signals at random moments of a verification, and many verifications at a time: who is left, and
what is said.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from robustness_inputs import fresh
from robustness_processes import fsdp2, start, survivors
from robustness_scripts import SAVING, TRAIN, hostile

PATIENCE = 10.0  # seconds until nothing may live any more
LIMIT = 120.0
STARTS = 1.5  # seconds that Python and our own imports may take on a busy machine
CODES = {
    signal.SIGINT: (130, -2),
    signal.SIGTERM: (143, -15),
    signal.SIGKILL: (-9,),
}  # negative: Python itself, before our first line
SCRIPTS = {
    "a right script": (TRAIN, SAVING),
    "one that hangs and ignores SIGTERM": (hostile("hangs and ignores SIGTERM"), ()),
}


def verification(folder: Path, report: str, more: tuple[str, ...]) -> list[str | bytes]:
    return fsdp2(
        [
            "verify",
            "in/a.py",
            "--steps",
            "3",
            "--timeout",
            "20",
            *more,
            "--report",
            f"json={report}",
        ]
    )


def leftovers(folder: Path) -> list[str]:
    """Temporary files but torch's own cache."""
    return [
        path.name
        for path in (folder / "tmp").iterdir()
        if not path.name.startswith("torchinductor")
    ]


def interrupted(script: str, number: signal.Signals, after: float, folder: Path) -> dict[str, Any]:
    """One verification that gets a signal after so many seconds."""
    code, more = SCRIPTS[script]
    fresh(folder)
    (folder / "in" / "a.py").write_text(code, encoding="utf-8")
    mark = uuid.uuid4().hex
    process = start(verification(folder, "out/r.json", more), folder, mark)
    try:
        _, err = process.communicate(timeout=after)
        whole = True
    except subprocess.TimeoutExpired:
        whole = False
        process.send_signal(number)
    began = time.monotonic()
    if not whole:
        _, err = process.communicate(timeout=LIMIT)
    seconds = time.monotonic() - began
    left = survivors(mark, PATIENCE)
    report = folder / "out" / "r.json"
    reported = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    return {
        "whole": whole,
        "after": round(after, 2),
        "code": process.returncode,
        "seconds": round(seconds, 2),
        "survivors": len(left),
        "traceback": b"Traceback (most recent call last)" in err,
        "leftovers": leftovers(folder),
        "report": "none" if reported is None else reported.get("interrupted", "whole"),
        "verdict": reported and reported["verdict"],
    }


def right(trial: dict[str, Any], number: signal.Signals) -> bool:
    """Whether an interrupted verification ended as it should."""
    if trial["whole"]:
        return not trial["survivors"] and not trial["leftovers"]
    early = trial["report"] == "none" and trial["after"] < STARTS  # nothing had begun yet
    # 1: Python's own `site` was interrupted
    codes = (*CODES[number], 1) if early else CODES[number]
    handled = trial["code"] in codes and not trial["survivors"]
    if number == signal.SIGKILL:
        return handled
    part = trial["report"] == number.name and trial["verdict"] == "inconclusive"
    return handled and not trial["leftovers"] and (early or (part and not trial["traceback"]))


def at_random_moments(number: int, folder: Path) -> list[dict[str, Any]]:
    """Each signal, `number` times in the life of each script; three verifications at a time."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda pair: sent(*pair, number, folder), product(SCRIPTS, CODES)))


def sent(script: str, signal_: signal.Signals, number: int, folder: Path) -> dict[str, Any]:
    """One signal, `number` times in the life of one script."""
    chance = random.Random(f"{script} {signal_.name}")
    life = 8.0 if SCRIPTS[script][1] else 5.0
    own = folder / f"{signal_.name} {len(script)}"
    trials = [interrupted(script, signal_, chance.uniform(0.1, life), own) for _ in range(number)]
    row = {
        "script": script,
        "signal": signal_.name,
        "sent": sum(not trial["whole"] for trial in trials),
        "ended_before": sum(trial["whole"] for trial in trials),
        "exit_codes": dict(Counter(str(trial["code"]) for trial in trials)),
        "reports": dict(Counter(trial["report"] for trial in trials)),
        "survivors": sum(trial["survivors"] for trial in trials),
        "folders_left": sum(bool(trial["leftovers"]) for trial in trials),
        "longest_seconds_to_end": max(trial["seconds"] for trial in trials),
        "wrong": [trial for trial in trials if not right(trial, signal_)],
    }
    print(row, flush=True)
    return row


def in_parallel(number: int, wave: int, folder: Path) -> dict[str, Any]:
    """Verifications of one script in one folder, `wave` at a time; every fifth is interrupted."""
    fresh(folder)
    (folder / "in" / "a.py").write_text(TRAIN, encoding="utf-8")
    chance = random.Random("parallel")
    mark = uuid.uuid4().hex
    codes: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    tracebacks = 0
    began = time.monotonic()
    for first in range(0, number, wave):
        running = []
        for each in range(first, min(first + wave, number)):
            command = verification(
                folder, f"out/{each}.json", ("--only", "wrapping", "--only", "matches-ddp")
            )
            running.append((each, start(command, folder, mark)))
        time.sleep(chance.uniform(4.0, 12.0))
        for each, process in running:
            if each % 5 == 0:
                process.send_signal(chance.choice((signal.SIGINT, signal.SIGTERM)))
        for each, process in running:
            _, err = process.communicate(timeout=LIMIT * 3)
            codes[str(process.returncode)] += 1
            tracebacks += process.returncode >= 0 and b"Traceback (most recent call last)" in err
            report = folder / "out" / f"{each}.json"
            reported = (
                json.loads(report.read_text(encoding="utf-8"))
                if report.exists()
                else {"verdict": "no report"}
            )
            verdicts[
                f"{reported['verdict']}{', interrupted' if 'interrupted' in reported else ''}"
            ] += 1
        print(first, dict(codes), dict(verdicts), file=sys.stderr, flush=True)
    return {
        "starts": number,
        "at_a_time": wave,
        "exit_codes": dict(codes),
        "verdicts": dict(verdicts),
        "tracebacks": tracebacks,
        "survivors": len(survivors(mark, PATIENCE)),
        "folders_left": len(leftovers(folder)),
        "seconds": round(time.monotonic() - began),
    }

"""A verification that gets a signal at random moments: whether the user's files are as before.

    python benchmarks/isolation/kills.py --fsdp2 "python /path/to/skill" --moments 40 [--out FILE]

The script overwrites, renames and deletes files of the user. The signal goes to the process of
`fsdp2 verify` alone. Afterwards all files must be as before, no process left after 10 seconds, and
no folder in TMPDIR; after SIGKILL one may stay there, and the next verification must remove it.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from acts import Place
from digest import Difference, differences, tree
from trial import (
    LIMIT,
    Listener,
    Outcome,
    Tool,
    arguments,
    folders,
    leftovers,
    start,
    survivors,
    tool,
    verified,
)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WAYS = (
    *("open-w", "append", "unlink", "rename", "replace", "rename-folder", "truncate", "rmtree"),
    *("torch-save", "memmap", "link", "symlink", "mkdir-tree", "tempfile", "dcp-save"),
)  # those that the version before the isolation put back, too
SCRIPT = ["--ways", ",".join(WAYS), "--linger", "0.3"]
FULL: tuple[str, ...] = ("--timeout", "60", "--skip", "checkpoint")
EARLIEST = 0.2


def weighed(changes: list[Difference]) -> tuple[list[str], int, int]:
    """What differs; how many folders have another time only; how many paths are __pycache__."""
    cached = [one for one in changes if "__pycache__" in one.path.split("/")]
    others = [one for one in changes if one not in cached]
    strong = [f"{one.what}: {one.path}" for one in others if one.outcome != "time of a folder"]
    return strong, len(others) - len(strong), len(cached)


def struck(tool: Tool, number: signal.Signals, after: float) -> dict[str, Any]:
    """One verification that gets a signal after so many seconds."""
    mark = uuid.uuid4().hex
    with folders(tool, list(WAYS)) as place:
        before = tree(place.roots())
        with Listener() as listener:
            command = tool.verify(place, [*SCRIPT, "--port", str(listener.port)], FULL)
            process = start(command, place, mark)
            row: dict[str, Any] = {"after": round(after, 2), "ended_before": True}
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                row["ended_before"] = False
                process.send_signal(number)
            began = time.monotonic()
            row["code"] = ended(process)
            row["seconds"] = round(time.monotonic() - began, 2)
            row["processes"] = survivors(mark, place)
        row["writing"] = any(one.get("event") == "begin" for one in listener.received)
        changes = differences(before, tree(place.roots()))
        row["differs"], row["times"], row["cached"] = weighed(changes)
        row["tmp"] = leftovers(place)
        if number == signal.SIGKILL:
            row |= started_again(tool, place)
    row["right"] = right(row, number)
    return row


def ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def started_again(tool: Tool, place: Place) -> dict[str, Any]:
    """The next verification in the same folder: what it leaves of the one that was killed."""
    unlocked = Tool(tool.command, tool.isolation, tool.folder, None)  # locked already
    outcome = verified(unlocked, place, SCRIPT)
    differs = weighed(outcome.changes)[0]
    return {"next": outcome.verdict, "next_differs": differs, "next_tmp": outcome.tmp}


def right(row: dict[str, Any], number: signal.Signals) -> bool:
    """Whether everything is as it must be."""
    if row["differs"] or row["processes"]:
        return False
    if number == signal.SIGKILL:
        again = row["next"] == "pass" and not row["next_differs"] and not row["next_tmp"]
        return again and len(row["tmp"]) <= 1
    return not row["tmp"]


def undisturbed(tool: Tool, at_a_time: int) -> Outcome:
    """The slowest of so many verifications side by side, as the trials are."""
    unlocked = Tool(tool.command, tool.isolation, tool.folder, None)

    def one(_: int) -> Outcome:
        with folders(tool, list(WAYS)) as place:
            return verified(unlocked, place, SCRIPT, FULL)

    with tool.locked(), ThreadPoolExecutor(at_a_time) as pool:
        return max(pool.map(one, range(at_a_time)), key=lambda outcome: outcome.seconds)


def table(
    tool: Tool, signals: list[signal.Signals], moments: int, at_a_time: int, seed: int
) -> dict[str, Any]:
    """Each signal at so many moments of a whole verification."""
    whole = undisturbed(tool, at_a_time)
    print(
        f"whole: {whole.verdict}, {whole.seconds:.1f} s, {whole.performed('open-w')} runs",
        flush=True,
    )
    chance = random.Random(seed)
    numbers = [number for number in signals for _ in range(moments)]
    trials = [(number, chance.uniform(EARLIEST, whole.seconds)) for number in numbers]
    rows: list[tuple[signal.Signals, dict[str, Any]]] = []
    with ThreadPoolExecutor(at_a_time) as pool:
        for first in range(0, len(trials), at_a_time):
            batch = trials[first : first + at_a_time]
            with tool.locked():
                done = list(pool.map(lambda one: struck(tool, *one), batch))
            for (number, _), row in zip(batch, done, strict=True):
                rows.append((number, row))
                if not row["right"]:
                    print(number.name, json.dumps(row)[:600], flush=True)
    return {
        "isolation": whole.isolation or tool.isolation,
        "seed": seed,
        "whole_verdict": whole.verdict,
        "whole_seconds": round(whole.seconds, 1),
        "runs": whole.performed("open-w"),
        "rows": [summed(each.name, [row for one, row in rows if one == each]) for each in signals],
    }


def summed(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of one signal."""
    wrong = [row for row in rows if not row["right"]]
    found = {
        "signal": name,
        "sent": sum(not row["ended_before"] for row in rows),
        "ended_before": sum(row["ended_before"] for row in rows),
        "while_or_after_writes": sum(row["writing"] for row in rows),
        "right": len(rows) - len(wrong),
        "files_differ": sum(bool(row["differs"]) for row in rows),
        "folder_times_differ": sum(bool(row["times"]) for row in rows),
        "python_caches_left": sum(bool(row["cached"]) for row in rows),
        "processes_left": sum(bool(row["processes"]) for row in rows),
        "folders_left_in_tmp": sum(bool(row["tmp"]) for row in rows),
        "codes": dict(Counter(str(row["code"]) for row in rows)),
        "longest_seconds_to_end": max(row["seconds"] for row in rows),
        "wrong_after_seconds": [row["after"] for row in wrong],
    }
    if "next" in rows[0]:
        found["next_start_leaves_folder"] = sum(bool(row["next_tmp"]) for row in rows)
        found["next_start_not_pass"] = sum(row["next"] != "pass" for row in rows)
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--moments", type=int, default=3, help="of each signal (40 for the table)")
    parser.add_argument("--at-a-time", type=int, default=2, help="verifications beside one another")
    parser.add_argument("--seed", type=int, default=0)
    names = [each.name for each in SIGNALS]
    parser.add_argument("--signal", choices=names, action="append", help="only these")
    given = parser.parse_args()
    chosen = [each for each in SIGNALS if each.name in (given.signal or names)]
    results = table(tool(given), chosen, given.moments, given.at_a_time, given.seed)
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 1 if any(row["wrong_after_seconds"] for row in results["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())

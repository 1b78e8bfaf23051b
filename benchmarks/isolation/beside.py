"""What else goes on beside a verification, and what it costs.

    python benchmarks/isolation/beside.py --fsdp2 "python /path/to/skill" [--part NAME] [--out FILE]

`job`: another job appends 1,000 lines to a file that the script writes, too: all are there
afterwards, and no others. `together`: two and four verifications of one folder at once have the
verdict that each has alone. `files`: seconds that a run costs which writes 5,000 files (--written),
in a folder that existed and in a new one. `large`: seconds that 20 GB in the project cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from acts import Place
from digest import differences, tree
from kills import weighed
from trial import Outcome, Tool, arguments, folders, leftovers, tool, verified

LINES = 1000
LARGE_FILES, LARGE_SIZE = 10, 2_000_000_000
WAYS = ["open-w", "unlink", "rename-folder", "torch-save", "counter", "rotated-log", "dcp-save"]
FIRST = "of the user, before\n"


def appending(path: Path, seconds: float, keeps_open: bool, times: list[float]) -> None:
    """A job that logs LINES lines in so many seconds; `times`: when it did."""
    began = time.monotonic()
    with path.open("a", encoding="utf-8") if keeps_open else nullcontext() as kept:
        for number in range(LINES):
            time.sleep(max(0.0, began + seconds * number / LINES - time.monotonic()))
            times.append(time.monotonic())
            if kept is not None:
                kept.write(f"job {number}\n")
                kept.flush()
            else:
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"job {number}\n")


def logged(tool: Tool, mode: str, keeps_open: bool) -> dict[str, Any]:
    """A script that appends to a file, or rewrites it, while a job appends to it."""
    script = [mode, "log.txt", "--linger", "0.5"]
    unlocked = Tool(tool.command, tool.isolation, tool.folder, None)
    times: list[float] = []
    with folders(tool, []) as place:
        (place.project / "log.txt").write_text(FIRST, encoding="utf-8")
        seconds = verified(tool, place, script).seconds
    with tool.locked(), folders(tool, []) as place:
        log = place.project / "log.txt"
        log.write_text(FIRST, encoding="utf-8")
        job = threading.Thread(target=appending, args=(log, 1.2 * seconds, keeps_open, times))
        job.start()
        outcome = verified(unlocked, place, script)
        job.join()
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    steps = sorted(one["at"] for one in outcome.received if one.get("way") == "log") or [0.0]
    wanted = [FIRST, *(f"job {number}\n" for number in range(LINES))]
    return {
        "script": mode.removeprefix("--"),
        "job": "keeps the file open" if keeps_open else "opens it for each line",
        "lines_during_the_runs": len([at for at in times if steps[0] < at < steps[-1]]),
        "lines_lost": len(set(wanted) - set(lines)),
        "lines_of_others": len([line for line in lines if line not in set(wanted)]),
        "exactly_as_written": lines == wanted,
        "verdict": outcome.verdict,
        "seconds": round(outcome.seconds, 1),
    }


def beside_a_job(tool: Tool, given: argparse.Namespace) -> list[dict[str, Any]]:
    modes = product(("--append", "--rewrite"), (False, True))
    return [logged(tool, mode, keeps_open) for mode, keeps_open in modes]


def statuses(outcome: Outcome) -> dict[str, str]:
    """The verdict and the status of each rule."""
    found = {"verdict": outcome.verdict}
    for one in outcome.report.get("findings", []):
        found[one["rule"]] = " ".join(sorted({*found.get(one["rule"], "").split(), one["status"]}))
    return found


def at_once(tool: Tool, number: int) -> dict[str, Any]:
    """Verifications of one folder at the same time, against one alone."""
    script = ["--ways", ",".join(WAYS), "--linger", "0.3"]
    unlocked = Tool(tool.command, tool.isolation, tool.folder, None)
    more = ("--timeout", "120", "--steps", "4", "--skip", "checkpoint")
    with folders(tool, WAYS) as place:
        alone = statuses(verified(tool, place, script, more))
    with folders(tool, WAYS) as place:
        before = tree(place.roots())
        with tool.locked(), ThreadPoolExecutor(number) as pool:
            waiting = [pool.submit(verified, unlocked, place, script, more) for _ in range(number)]
            outcomes = [one.result() for one in waiting]
        differs, _, cached = weighed(differences(before, tree(place.roots())))
        left = leftovers(place)
    others = [statuses(one) for one in outcomes]
    names = {name for one in others for name in alone.keys() | one.keys()}
    differ = [each for each in names if {alone.get(each)} != {one.get(each) for one in others}]
    return {
        "at_once": number,
        "alone": alone["verdict"],
        "verdicts": [one["verdict"] for one in others],
        "rules": len(alone) - 1,
        "rules_that_differ": sorted(differ),
        "files_that_differ": differs[:4],
        "python_caches_left": cached,
        "left_in_tmp": left,
        "seconds": [round(one.seconds, 1) for one in outcomes],
    }


def together(tool: Tool, given: argparse.Namespace) -> list[dict[str, Any]]:
    return [at_once(tool, number) for number in (2, 4)]


def own_seconds(tool: Tool, number: int) -> float:
    """Seconds that the writes of the script take by themselves, outside a verification."""
    with folders(tool, []) as place:
        begun = time.monotonic()
        for each in range(number):
            (place.project / f"{each}.txt").write_text(f"sample {each}\n" * 8)
        return time.monotonic() - begun


def with_folder(place: Place) -> None:
    (place.project / "many").mkdir()


def many_files(tool: Tool, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a verification with the files, less those without and those of the writes."""
    own = statistics.median(own_seconds(tool, given.written) for _ in range(given.repeats))
    rows = []
    for where, prepare in (
        ("a folder of the user", with_folder),
        ("a folder of the run", lambda _: None),
    ):
        plain, written = alternating(tool, given.repeats, prepare, ["--files", str(given.written)])
        runs = statistics.median(one.performed("files") for one in written)
        more = median(written) - median(plain)
        said = [word for one in written for word in one.received]
        inside = [word["seconds"] for word in said if word.get("way") == "files"]
        row = {
            "files": given.written,
            "in": where,
            "runs_that_wrote": runs,
            "seconds_with": round(median(written), 2),
            "seconds_without": round(median(plain), 2),
            "writes_outside": round(own, 2),
            "writes_in_a_run": round(statistics.median(inside or [0.0]), 2),
            "seconds_of_the_verifier": round(more - runs * own, 2),
            "verdicts": [one.verdict for one in written],
        }
        rows.append(row | differing(written))
    return rows


def differing(outcomes: list[Outcome]) -> dict[str, Any]:
    """What differs after the verifications."""
    weights = [weighed(one.changes) for one in outcomes]
    names = sorted({name for strong, _, _ in weights for name in strong})
    return {
        "files_that_differ": names[:4],
        "python_caches_left": max(cached for _, _, cached in weights),
    }


def median(outcomes: list[Outcome]) -> float:
    return statistics.median(one.seconds for one in outcomes)


def alternating(
    tool: Tool, repeats: int, prepare: Callable[[Place], None], script: list[str]
) -> tuple[list[Outcome], list[Outcome]]:
    """Verifications as they are, and prepared with these arguments of the script, in turn."""
    plain, other = [], []
    for _ in range(repeats):
        with folders(tool, []) as place:
            plain.append(verified(tool, place, []))
        with folders(tool, []) as place:
            prepare(place)
            other.append(verified(tool, place, script))
    return plain, other


def large_files(place: Place) -> None:
    """Data of a project: sparse files, which take no place on the disk."""
    (place.project / "data").mkdir()
    for number in range(LARGE_FILES):
        with (place.project / "data" / f"shard_{number}.bin").open("wb") as file:
            file.write(b"data")
            file.truncate(LARGE_SIZE)


def large_project(tool: Tool, given: argparse.Namespace) -> list[dict[str, Any]]:
    plain, other = alternating(tool, given.repeats, large_files, [])
    return [
        {
            "gigabytes": LARGE_FILES * LARGE_SIZE / 1e9,
            "seconds_with": round(median(other), 2),
            "seconds_without": round(median(plain), 2),
            "difference": round(median(other) - median(plain), 2),
            "verdicts": [one.verdict for one in other],
            **differing(other),
        }
    ]


PARTS: dict[str, Callable[[Tool, argparse.Namespace], list[dict[str, Any]]]] = {
    "job": beside_a_job,
    "together": together,
    "files": many_files,
    "large": large_project,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this")
    parser.add_argument("--written", type=int, default=5000, help="files that a run writes")
    parser.add_argument("--repeats", type=int, default=3, help="of what is timed")
    given = parser.parse_args()
    measuring = tool(given)
    results: dict[str, Any] = {"isolation": measuring.isolation}
    for part in given.part or PARTS:
        results[part] = PARTS[part](measuring, given)
        for row in results[part]:
            print(part, json.dumps(row), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

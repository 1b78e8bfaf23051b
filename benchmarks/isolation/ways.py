"""Ways to write or delete files of the user in a script that is verified: is all as before?

    python benchmarks/isolation/ways.py --fsdp2 "python /path/to/skill" [--isolation overlay]

The script is a right training. Several ways share a verification, each in a folder of its own, so
that a path that differs belongs to one way. A way that was not performed in the company of others
(because the run was stopped) is tried again alone. Outcomes: `held` (every path as before);
`time of a folder` (only times of last change of folders differ); `changed`, `lost` and `left`, with
the paths. `performed`: the runs of the verification that did it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from acts import WAYS, Unavailable, Way
from digest import Difference
from trial import Outcome, Tool, arguments, folders, tool, verified

TOGETHER = 16  # ways in one verification
SHOWN = 4  # paths of a row
ORDER = ("lost", "changed", "left", "time of a folder")


def groups(names: list[str]) -> list[list[str]]:
    """Which ways share a verification."""
    shared = [name for name in names if not WAYS[name].alone]
    found = [shared[first : first + TOGETHER] for first in range(0, len(shared), TOGETHER)]
    return found + [[name] for name in names if WAYS[name].alone]


def owner(path: str, ways: list[Way]) -> str:
    """The way that a path belongs to, or ""."""
    if "__pycache__" in path.split("/"):
        return "pycache"
    for way in ways:
        if any(path == each or path.startswith(each + "/") for each in way.prefixes):
            return way.name
    return ""


def shortened(text: str) -> str:
    """A message without the paths of this machine."""
    return re.sub(r"/[^ '\"]*/(?=(python|work/|home/))", "", text)[:120]


def judged(name: str, changes: list[Difference], outcome: Outcome) -> dict[str, Any]:
    """The row of one way."""
    counts = Counter(change.outcome for change in changes)
    kinds = [kind for kind in ORDER if counts[kind]]
    strong = [kind for kind in kinds if kind != "time of a folder"] or kinds
    row: dict[str, Any] = {"way": name, "outcome": " + ".join(strong) or "held"}
    if kinds:
        row["paths"] = {kind: counts[kind] for kind in kinds}
        shown = [one for kind in strong for one in changes if one.outcome == kind]
        row["which"] = [f"{one.what}: {one.path[:90]}" for one in shown[:SHOWN]]
    row["performed"] = outcome.performed(name)
    said = [one for one in outcome.received if one.get("way") == name]
    errors = {one["text"] for one in said if one["event"] == "error"}
    if errors:
        row["error"] = shortened(sorted(errors)[0])
    states = [one["state"] for one in said if one["event"] == "begin"]
    if len(set(states)) > 1:
        row["a_later_run_met"] = "other files than the first"
    advice = [line.strip() for line in outcome.printed.splitlines() if "--allow-writes" in line]
    if advice:
        row["says"] = advice[0][:160]
    row |= {"exit": outcome.code, "verdict": outcome.verdict}
    return row


def tried(names: list[str], tool: Tool) -> tuple[list[dict[str, Any]], Outcome]:
    """The rows of ways that share a verification, and one for the paths that are no way's."""
    ways = [WAYS[name] for name in names]
    with folders(tool, names) as place:
        settle = 4.0 if "child-late" in names else 0.0
        outcome = verified(tool, place, ["--ways", ",".join(names)], settle=settle)
    belongs = {change: owner(change.path, ways) for change in outcome.changes}
    own = {name: [one for one in outcome.changes if belongs[one] == name] for name in names}
    rows = [judged(name, changes, outcome) for name, changes in own.items()]
    others = [change for change in outcome.changes if not belongs[change]]
    if any(change.outcome != "time of a folder" for change in others):
        rows.append(judged(f"(no way's, beside {names[0]})", others, outcome))
    return rows, outcome


def measured(names: list[str], tool: Tool) -> dict[str, Any]:
    """All ways, those again that could not be performed together with others."""
    rows: list[dict[str, Any]] = []
    isolation: Any = None
    left: Counter[str] = Counter()
    waiting = groups(names)
    while waiting:
        group = waiting.pop(0)
        try:
            found, outcome = tried(group, tool)
        except Unavailable as error:
            print(f"{group}: {error}", flush=True)
            if len(group) > 1:
                waiting += [[name] for name in group]
            else:
                rows.append(
                    {
                        "way": group[0],
                        "outcome": "not available",
                        "error": str(error),
                        "performed": 0,
                    }
                )
            continue
        isolation = outcome.isolation or isolation
        left["processes"] += len(outcome.survivors)
        left["tmp"] += len(outcome.tmp)
        left["shm"] += len(outcome.shm)
        head = f"{len(group)} ways, exit {outcome.code}, {outcome.verdict}, {outcome.seconds:.1f} s"
        print(head, *outcome.survivors, *outcome.tmp, *outcome.shm, flush=True)
        for row in found:
            if not row["performed"] and len(group) > 1 and row["way"] in WAYS:
                waiting.append([row["way"]])
                continue
            rows.append(row)
            print("  ", json.dumps(row), flush=True)
        if outcome.code not in (0, 1, 4) or (len(group) == 1 and not outcome.performed(group[0])):
            print(outcome.printed[-3000:], flush=True)
    rows.sort(key=lambda row: list(WAYS).index(row["way"]) if row["way"] in WAYS else len(WAYS))
    outcomes = Counter(row["outcome"] for row in rows if row["way"] in WAYS)
    return {
        "isolation": isolation or tool.isolation,
        "ways": len(names),
        "outcomes": dict(outcomes.most_common()),
        "not_performed": [row["way"] for row in rows if not row["performed"]],
        "left_elsewhere": dict(left),
        "rows": rows,
    }


def text(results: dict[str, Any]) -> str:
    """JSON with one row a line."""
    head = {key: value for key, value in results.items() if key != "rows"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join("  " + json.dumps(row) for row in results["rows"])
    return "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}"]) + "\n"


def main() -> int:
    parser = arguments(__doc__)
    names = list(WAYS)
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="this way")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(WAYS))
        return 0
    results = measured(given.only or list(WAYS), tool(given))
    if given.out:
        Path(given.out).write_text(text(results), encoding="utf-8")
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1))
    return 0 if set(results["outcomes"]) <= {"held"} else 1


if __name__ == "__main__":
    raise SystemExit(main())

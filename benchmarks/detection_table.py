"""The results of `detection.py`: the last section of references/reliability.md, and rule by rule in
tests/faults/README.md.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Z = 1.959964  # 95 %
HEADING = "## How often it is right"
ABOUT = """\
Made by `make detection` from `benchmarks/results/corpus.json`; do not edit. \
Every seeded fault of `tests/faults/` and every
right script of `tests/zoo/` and `tests/hosts/` goes through the verifier \
with all its rules. A fault counts as found if its own rule
fails, or one that its case expects beside it, or one that only compares \
(with DDP, one process, the run that went on); as named
if its own rule is the first failure of the report. Intervals are Wilson's at 95 %.""".splitlines()
KINDS = {
    "script": "one short script, fault written into it",
    "edit": "a right script of the zoo, one place edited",
    "project": "a project of several modules, edited where two files meet",
}


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion."""
    if total == 0:
        return 0.0, 1.0
    share = hits / total
    middle = share + Z * Z / (2 * total)
    spread = Z * math.sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    scale = 1 + Z * Z / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def table(results: dict[str, Any]) -> str:
    """The whole section."""
    return "\n".join([*_head(results), *_by_kind(results), *_missed(results), *_limit(), ""])


def by_rule(results: dict[str, Any]) -> str:
    """The page that says for each rule which of its faults it found."""
    return "\n".join([*_by_rule(results), ""])


def in_page(page: str, results: dict[str, Any]) -> str:
    """The page with its last section made anew."""
    return page.partition(HEADING)[0] + table(results)


def _head(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    seeded = [row for row in rows if row["rule"]]
    silent = [row for row in seeded if row["silent"]]
    weak = [row for row in seeded if row["strength"] < 1]
    found = [row for row in seeded if row["found"]]
    named = sum(row["first"] == row["rule"] for row in found)
    environment = results["environment"]
    yield HEADING
    yield ""
    yield from ABOUT
    yield ""
    yield (
        f"torch {environment['torch']}, Python {environment['python']}, {environment['platform']},"
        f" {environment['cores']} cores, gloo."
    )
    yield ""
    yield "| measure | value | 95 % interval |"
    yield "|---|---|---|"
    yield _share("faults found", sum(row["found"] for row in seeded), len(seeded))
    yield _share(
        "silent faults found (exit 0, training goes on)",
        sum(row["found"] for row in silent),
        len(silent),
    )
    if weak:
        yield _share(
            "faults at a tenth of their strength found",
            sum(row["found"] for row in weak),
            len(weak),
        )
    yield _share("of the found: seeded rule named first", named, len(found))
    sizes = Counter(row["ranks"] for row in rows if not row["rule"])
    reported = ", ".join(f"{number} on {ranks}" for ranks, number in sorted(sizes.items()))
    yield _share(
        f"false alarms, runs of right scripts ({reported} ranks)",
        results["false_alarms"],
        results["right_runs"],
    )
    seconds = [row["seconds"] for row in rows]
    yield (
        f"| seconds for one verification: median, longest | {statistics.median(seconds):.1f},"
        f" {max(seconds):.1f} | |"
    )
    yield ""
    yield (
        "The corpus is this project's own, so the shares say how the rules do on the faults that it"
        " knows, not on all there are."
    )
    yield "Rule by rule: `tests/faults/README.md` in the repository."
    yield ""


def _by_kind(results: dict[str, Any]) -> Iterator[str]:
    yield "### By kind of case"
    yield ""
    yield "| kind | found | interval |"
    yield "|---|---|---|"
    for kind, reported in KINDS.items():
        rows = [row for row in results["rows"] if row["rule"] and row["kind"] == kind]
        if rows:
            yield _share(reported, sum(row["found"] for row in rows), len(rows))
    yield ""


def _by_rule(results: dict[str, Any]) -> Iterator[str]:
    yield "# Seeded faults, rule by rule"
    yield ""
    yield (
        "Made by `make detection` from `benchmarks/results/corpus.json`; do not edit. What it"
        " means: `references/reliability.md`."
    )
    yield ""
    yield "| rule that should name it | found | interval | named first | tier | seconds |"
    yield "|---|---|---|---|---|---|"
    seeded = [row for row in results["rows"] if row["rule"]]
    for rule in sorted({row["rule"] for row in seeded}):
        rows = [row for row in seeded if row["rule"] == rule]
        found = sum(row["found"] for row in rows)
        named = sum(row["first"] == rule for row in rows)
        low, high = wilson(found, len(rows))
        tiers = ", ".join(sorted({row["tier"] for row in rows}))
        seconds = statistics.median(row["seconds"] for row in rows)
        yield (
            f"| {rule} | {found} of {len(rows)} | {low:.0%} to {high:.0%} | {named} | {tiers} |"
            f" {seconds:.1f} |"
        )


def _missed(results: dict[str, Any]) -> Iterator[str]:
    missed = [row for row in results["rows"] if row["rule"] and not row["found"]]
    alarms = [row for row in results["rows"] if not row["rule"] and row["failed"]]
    if missed:
        yield "### Missed"
        yield ""
        for row in missed:
            yield (
                f"- `{row['case']}` ({row['rule']}): the report says"
                f" {', '.join(row['failed']) or 'nothing'}"
            )
        yield ""
    if alarms:
        yield "### False alarms"
        yield ""
        for row in alarms:
            yield f"- `{row['case']}` at {row['ranks']} ranks: {', '.join(row['failed'])}"
        yield ""


def _limit() -> Iterator[str]:
    """The smallest gradient error that is seen, if it has been measured
    (benchmarks/detection_limit.py).
    """
    path = RESULTS / "detection_limit.json"
    if not path.exists():
        return
    limits = json.loads(path.read_text(encoding="utf-8"))
    yield "### Detection limit"
    yield ""
    yield (
        "The smallest factor 1 + eps on gradients that is still found, in `zoo/minimal` on 2 ranks"
        " (`benchmarks/detection_limit.py`). A"
    )
    yield "factor before an active clip is undone by the clip and has no effect to be found."
    yield ""
    yield "| optimizer | where the factor stands | clip | found from | missed at |"
    yield "|---|---|---|---|---|"
    for row in limits["rows"]:
        found = [f"{row[key]:.1e}" if row[key] is not None else "-" for key in ("found", "missed")]
        yield (
            f"| {row['optimizer']} | {row['place']} | {'yes' if row['clip'] else 'no'} | {found[0]}"
            f" | {found[1]} |"
        )


def _share(label: str, hits: int, total: int) -> str:
    low, high = wilson(hits, total)
    return f"| {label} | {hits} of {total} | {low:.1%} to {high:.1%} |"

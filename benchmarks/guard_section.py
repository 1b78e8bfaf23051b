"""The section "The guard" of references/reliability.md, from benchmarks/results/guard_*.json.

python benchmarks/guard_section.py      # writes the section
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from results_file import with_section

ROOT = Path(__file__).resolve().parents[1]
RELIABILITY = ROOT / "references" / "reliability.md"
TITLE = "## The guard"


def result(name: str) -> Any:
    path = ROOT / "benchmarks" / "results" / f"guard_{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def found(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['found'] for row in rows)} of {len(rows)}"


def table() -> str:
    """Each law: faults found and named at first sight, and since."""
    sights = {"at first sight": result("first_sight"), "since": result("faults")}
    there = {name: one["cases"] for name, one in sights.items() if one is not None}
    lines = ["| law | " + " | ".join(f"found {name} | named" for name in there) + " |"]
    lines.append("|---|" + "---|---|" * len(there))
    laws = sorted({row["law"] for rows in there.values() for row in rows})
    for law in (*laws, ""):
        cells: list[str] = []
        for rows in there.values():
            own = [row for row in rows if law in ("", row["law"])]
            cells += [found(own), str(sum(row["named"] for row in own))]
        name = f"`{law}`" if law else "all"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost() -> str:
    """What it costs, in a sentence."""
    one = result("cost")
    more, used = (one["ratio_of_seconds"] - 1, one["ratio_of_processor_time"] - 1)
    return (
        f"With a comparison every {one['steps_between_comparisons']} steps of"
        f" {one['step_seconds']:.2f} s (the default is every 100), {one['pairs']} pairs of windows"
        f" with the guard and without it took {more:.1%} more time at the median and {used:.1%}"
        f" more processor time; peak memory of a rank {one['peak_mb']['guarded']:.0f} and"
        f" {one['peak_mb']['plain']:.0f} MB, start {one['start_seconds']:.2f} s"
        " (`benchmarks/guard/cost.py`)."
    )


def variants() -> str:
    """Right trainings that look like faults."""
    rows = result("right")["cases"]
    quiet = sum(not row["breaches"] for row in rows)
    return (
        f"{quiet} of {len(rows)} right trainings that look like faults"
        " (`benchmarks/guard/right.py`)"
        " had no breach (2 had one before two laws were repaired). "
    )


def public_trainers() -> str:
    """Public trainers below the guard."""
    one = result("trainers")
    if one is None:
        return ""
    rows = one["trainers"]
    names = ", ".join(f"{row['name']} ({row['last_step']:,} steps)" for row in rows)
    broken = sum(bool(row["breaches"]) for row in rows)
    judged = sum(row.get("judgement", "").startswith("true") for row in rows)
    other = sum(not row["same_bits"] and row["same_without"] for row in rows)
    return (
        f" Public trainers on 2 ranks, unmodified: {names}: {broken} with a breach ({judged} of"
        " them true by a measurement: norms whose updates float32 rounds to nothing),"
        f" {other} with other bits than without the guard"
        " (`benchmarks/guard/trainers.py`)."
    )


def right_scripts() -> str:
    """Right scripts below the guard."""
    one = result("right_scripts")["summary"]
    return (
        f"{one['checked']} right scripts of `tests/zoo/`, to their end with a comparison every 5"
        f" steps: {one['with_breaches']} with a breach, {one['other_bits']} with other bits in a"
        " weight or an optimizer state than without the guard"
        " (`benchmarks/guard/right_scripts.py`; 2 had a breach before two laws were repaired)."
    )


def flips() -> str:
    one = result("flips")
    if one is None:
        return ""
    rows = one["cases"]
    named = sum(bool(row.get("rank_named")) for row in rows)
    return (
        f" Of {len(rows)} single bit flips of replicated state on one rank, {found(rows)} were"
        f" found; in {named} the rank is named."
    )


def section() -> list[str]:
    """Its lines, with the heading."""
    first = result("first_sight")
    worlds = "torch 2.13.0, 8 ranks, CPU"
    judged = (
        f"{len(first['cases'])} of the 75 seeded faults of `benchmarks/guard/` (the others are held"
        " out), written without knowledge of the guard's code, each"
        f" in a training of its own ({worlds}; `benchmarks/guard/run.py`). Found: a breach within"
        " two comparisons of the first wrong step; named: of the fault's law."
    )
    made = (
        "Made by `benchmarks/guard_section.py` from `benchmarks/results/guard_*.json`; do not edit."
    )
    return [
        TITLE,
        "",
        made,
        judged + flips(),
        "",
        *table().split("\n"),
        "",
        variants() + right_scripts() + public_trainers(),
        "",
        cost(),
        "",
    ]


def main() -> int:
    text = RELIABILITY.read_text(encoding="utf-8")
    RELIABILITY.write_text(with_section(text, section()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

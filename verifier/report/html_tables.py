"""The tables of the page, as data: each with its caption, its columns and its rows of texts and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]
WIDE, CELLS = 8, 8_000  # ranks with a column each; numbers in all these columns
STEPS = 40  # columns of steps
DAMAGED = ("provoked", "repeat", "crash", "recovered", "damaged")
ROLES = {
    "train": "the script",
    "provoked": "with huge gradients, and NaN in memory that nobody has written",
    "repeat": "the script again, ended after the save that is resumed from",
    "full_precision": "without mixed precision, autocast and dropout",
    "undropped": "without dropout, one step",
    "rounded_weights": "from rounded weights, one step",
    "reference": "DDP in the place of fully_shard",
    "perturbed": "from weights one unit in the last place away",
    "single": "one process, the whole global batch",
    "original": "the script that it was converted from",
    "resume": "resumed on as many ranks",
    "resume_full_precision": "resumed, in full precision",
    "reshard": "resumed on other ranks",
    "inspect": "opens what was saved",
    "crash": "killed in a save",
    "recovered": "resumed after the kill",
    "damaged": "resumed from a damaged checkpoint",
    "simulate": "one process with a fake process group",
}


@dataclass(frozen=True)
class Table:
    """`columns`: (title, whether it holds numbers); the first cell of a row names it."""

    caption: str
    columns: list[tuple[str, bool]]
    rows: list[list[Any]]
    note: str = ""


def tables(report: Report) -> dict[str, Table]:
    """Every table that has rows, by name."""
    made = {
        "baseline": _baseline(report),
        "skipped": _skipped(report),
        "not_followed": _not_followed(report),
        "passes": _passes(report),
        "not_applicable": _not_applicable(report),
        "losses": _by_step(report, "losses", "Loss of each step"),
        "grad_norms": _by_step(report, "grad_norms", "Norm of the whole gradient in each step, before clipping"),
        "loss": _apart(report, "loss", "Relative difference of the loss"),
        "grad_norm": _apart(report, "grad_norm", "Relative difference of the gradient norm"),
        "shards": _shards(report),
        "memory": _memory(report),
        "traffic": _traffic(report),
        "saved": _saved(report),
        "returned": _returned(report),
        "runs": _runs(report),
        "environment": _environment(report),
    }
    return {name: table for name, table in made.items() if table.rows}


def label(run: Report) -> str:
    """A run by its role and ranks."""
    return f"{run['role']}, {run['world_size']} rank{'' if run['world_size'] == 1 else 's'}"


def place(location: Report, folder: str) -> str:
    """`file:line in function`, the file as seen from the folder in which the script was run."""
    file = Path(location["file"])
    seen = file.relative_to(folder) if folder and file.is_relative_to(folder) else file
    return f"{seen}:{location['line']}" + (f" in {location['function']}" if location["function"] else "")


def offset(report: Report, run: Report) -> int:
    """The steps that were made before the first step of a run."""
    resumed = run["role"] in ("resume", "resume_full_precision", "reshard")
    return int(report["facts"].get("saved_after_step") or 0) if resumed else 0


def curves(report: Report) -> list[Report]:
    """The runs whose losses can be laid over each other."""
    return [r for r in report["runs"] if any(v is not None for v in r["losses"]) and r["role"] not in DAMAGED]


def number(value: float | None, digits: int = 3) -> str | None:
    """A number for a cell."""
    if value is None:
        return None
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 10**digits else f"{value:.{digits}g}"


def size(count: int | None) -> str | None:
    """Bytes, in the unit that suits them."""
    if count is None:
        return None
    unit, power = next(((u, p) for u, p in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if count >= 1 << p), ("B", 0))
    return f"{count / (1 << power):.1f} {unit}" if power else f"{count} B"


def _passes(report: Report) -> Table:
    columns = [("Rule", False), ("Evidence", False), ("Measured", True), ("Limit", True), ("Margin", True)]
    rows = [
        [f["rule"], f["evidence"], number(f["measured"]), number(f["limit"]), _times(f["margin"])]
        for f in report["findings"]
        if f["status"] == "pass"
    ]
    return Table("Rules that hold, and what shows it", columns, rows)


def _not_applicable(report: Report) -> Table:
    rows = [[f["rule"], f["evidence"]] for f in report["findings"] if f["status"] == "not_applicable"]
    return Table("Rules about what the script does not have", [("Rule", False), ("Reason", False)], rows)


def _baseline(report: Report) -> Table:
    held = report.get("baseline", {})
    cwd = report["target"].get("cwd", "")
    told = {
        "new": "new",
        "standing": "known, not fixed yet",
        "gone": "gone",
        "unjudged": "known, not decided this time",
    }
    rows = [
        [one["rule"], what, place(one["location"], cwd) if one["location"] else None]
        for kind, what in told.items()
        for one in held.get(kind, [])
    ]
    return Table("Failures, beside those of the earlier report", [("Rule", False), ("Now", False), ("At", False)], rows)


def _skipped(report: Report) -> Table:
    rows = [[skip["rule"], skip["reason"], skip["until"]] for skip in report["skipped"]]
    return Table("Rules that were not judged", [("Rule", False), ("Reason", False), ("Until", False)], rows)


def _times(margin: float | None) -> str | None:
    return None if margin is None else f"{margin:,.0f}x" if margin >= 10 else f"{margin:.1f}x"


def _by_step(report: Report, field: str, caption: str) -> Table:
    runs = curves(report)
    last = max((offset(report, run) + len(run[field]) for run in runs), default=0)
    rows = []
    for run in runs:
        values = [None] * offset(report, run) + [number(value, 7) for value in run[field]]
        rows.append([label(run), *[values[k] if k < len(values) else None for k in range(min(last, STEPS))]])
    return Table(caption, _steps(last), rows, _cut(last))


def _apart(report: Report, field: str, caption: str) -> Table:
    found = report["facts"].get("comparisons", [])
    last = max((c["after_step"] + len(c[field]) for c in found), default=0)
    rows = []
    for one in found:
        run, oracle = (label(report["runs"][one[key]]) for key in ("run", "oracle"))
        values = [None] * one["after_step"] + [number(value) for value in one[field]]
        cells = [values[k] if k < len(values) else None for k in range(min(last, STEPS))]
        rows.append([f"{run} against {oracle}", one["rule"] or "sets the limit", number(one["allowed"][field]), *cells])
    (name, _), *steps = _steps(last)
    columns = [(name, False), ("Judged by", False), ("Allowed", True), *steps]
    return Table(f"{caption}, by step", columns, rows, _cut(last))


def _steps(last: int) -> list[tuple[str, bool]]:
    return [("Run", False), *((f"Step {step}", True) for step in range(1, min(last, STEPS) + 1))]


def _cut(last: int) -> str:
    return f"{last - STEPS} more steps are in --report json=PATH." if last > STEPS else ""


def _shards(report: Report) -> Table:
    facts = report["facts"]
    ranks, shards = facts.get("ranks", []), facts.get("shards", [])
    if all(len(set(shard["elements"])) == 1 for shard in shards):
        held, shown = [f"Each of {len(ranks)} ranks" if len(ranks) > 1 else "Rank 0"], _one
    elif len(ranks) <= WIDE and len(ranks) * len(shards) <= CELLS:
        held, shown = [f"Rank {rank}" for rank in ranks], _all
    else:
        held, shown = ["Least on a rank", "Most on a rank"], _span
    titles = [("Parameter", False), ("Shape", True), ("Dtype", False), ("Placement", False), ("Group", False)]
    rows = []
    for shard in shards:
        shape = " x ".join(map(str, shard["shape"])) or "scalar"
        dtype = shard["dtype"] + ("" if shard["trainable"] else ", frozen")
        group = "none" if shard["group"] is None else shard["group"] or "(root)"
        placed = ", ".join(shard["placements"]) or "plain tensor"
        rows.append([shard["name"], shape, dtype, placed, group, *map(number, shown(shard["elements"]))])
    columns = [*titles, *((title, True) for title in held)]
    return Table("Elements of each parameter on each rank", columns, rows)


def _one(counts: list[int | None]) -> list[int | None]:
    return counts[:1]


def _all(counts: list[int | None]) -> list[int | None]:
    return counts


def _span(counts: list[int | None]) -> list[int | None]:
    known = [count for count in counts if count is not None]
    return [min(known), max(known)]


def _memory(report: Report) -> Table:
    found = report["facts"].get("memory", [])
    cuda = any(row["process"]["cuda"] is not None for row in found)
    titles = ["Parameters", "Gradients", "Optimizer state", "Process, before the script", "Process, peak"]
    columns = [("Rank", False), *((title, True) for title in titles), *([("CUDA, peak", True)] if cuda else [])]
    rows = []
    for row in found:
        own = [row[kind] for kind in ("parameters", "gradients", "optimizer")]
        measured = [row["process"][kind] for kind in ("before", "peak", *(["cuda"] if cuda else []))]
        rows.append([f"{row['rank']}", *map(size, own), *map(size, measured)])
    return Table("Memory of each rank that was run", columns, rows)


def _traffic(report: Report) -> Table:
    counted, expected = report["facts"].get("traffic", {}), report["facts"].get("expected_traffic", {})
    seen = {key.removesuffix(f"_{where}") for where in ("model", "script") for key in counted if key.endswith(where)}
    titles = ["Expected", "Counted in forward and backward", "Bytes", "Called by the script itself", "Bytes of these"]
    rows = []
    for kind in sorted(seen | {kind for kind, times in expected.items() if times}):
        row: list[Any] = [kind, number(expected.get(kind, 0))]
        for where in ("model", "script"):
            times, moved = (counted.get(f"{kind}_{where}{what}", 0) for what in ("", "_bytes"))
            row += [number(times), size(moved or None)]
        rows.append(row)
    return Table(
        "Collectives of one step on rank 0", [("Collective", False), *((title, True) for title in titles)], rows
    )


def _saved(report: Report) -> Table:
    titles = [("Saved to", False), ("After step", True), ("By", False), ("Ranks", True), ("Tensors", True)]
    rows = []
    for one in report["facts"].get("checkpoints", []):
        told = {
            "opened": f"{one['wrong']} tensors are not as they were given"
            if one["wrong"]
            else "all as they were given",
            "closed": f"could not be opened: {one['error']}",
            "gone": "removed by the script since",
            "not opened": "not opened",
        }[one["state"]]
        rows.append([one["path"], one["after_step"], one["op"], one["ranks"], one["tensors"], told])
    return Table("What was saved, opened again by another process", [*titles, ("Opened", False)], rows)


def _returned(report: Report) -> Table:
    apart = {c["run"]: c for c in report["facts"].get("comparisons", []) if c["rule"] and c["after_step"]}
    rows = []
    for one in report["facts"].get("returns", []):
        run = report["runs"][one["run"]]
        ended = "completed" if run["completed"] else "stopped"
        measures = [value for value in apart.get(one["run"], {"loss": []})["loss"] if value is not None]
        allowed = apart[one["run"]]["allowed"]["loss"] if one["run"] in apart else None
        worst = number(max(measures)) if measures else None
        loads = ", ".join(one["loads"]) or None
        rows.append([label(run), run["note"] or ROLES[run["role"]], loads, ended, one["steps"], worst, number(allowed)])
    titles = [("Run", False), ("What was done", False), ("Loads", False), ("End", False), ("Steps", True)]
    titles += [("Loss apart, at most", True), ("Allowed", True)]
    damaged = any(report["runs"][one["run"]]["role"] == "damaged" for one in report["facts"].get("returns", []))
    note = "A resume from a damaged checkpoint is right if it stops." if damaged else ""
    return Table("What came back from the checkpoints", titles, rows, note)


def _runs(report: Report) -> Table:
    columns = [("Run", False), ("What it is", False), ("Seconds", True), ("Steps", True), ("End", False)]
    rows = []
    for run in report["runs"]:
        codes = ", ".join(f"{rank}: {code}" for rank, code in run["exit"].items() if code)
        end = ("completed" if run["completed"] else "did not complete") + (f"; exit by rank {codes}" if codes else "")
        what = run["note"] or ROLES[run["role"]]
        rows.append([label(run), what, f"{run['seconds']:.1f}", len(run["losses"]), end, run["command"] or None])
    return Table("Runs that were made", [*columns, ("Command", False)], rows)


def _not_followed(report: Report) -> Table:
    titles = [("Callee", False), ("At", False), ("Calls", True), ("Why", False)]
    sources = report["facts"].get("sources", {"not_followed": ()})
    cwd = report["target"].get("cwd", "")
    rows = [
        [one["callee"], place({**one, "function": ""}, cwd), one["calls"], one["reason"]]
        for one in sources["not_followed"]
    ]
    return Table("Calls that could not be followed", titles, rows)


def _environment(report: Report) -> Table:
    told = {**report["environment"], **report["target"]}
    rows = [[key.replace("_", " "), _plain(value)] for key, value in told.items() if value not in ("", [], None)]
    return Table("Where and how it was run", [("Name", False), ("Value", False)], rows)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

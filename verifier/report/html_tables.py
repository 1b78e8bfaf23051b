"""The tables of the HTML report, as data: each with its caption, its columns and its rows of texts
and numbers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.wording import count
from ..trace.roles import ROLES

Report = dict[str, Any]
WIDE, CELLS = 8, 8_000  # ranks with a column each; numbers in all these columns
STEPS = 40  # columns of steps


@dataclass(frozen=True)
class Table:
    """`titles`: of the columns, separated by `|`; `>` begins that of numbers.

    The first cell of a row names it.
    """

    caption: str
    titles: str
    rows: list[list[Any]]
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """(title, whether it holds numbers) of each column."""
        return [(title.removeprefix(">"), title[0] == ">") for title in self.titles.split("|")]


def tables(report: Report) -> dict[str, Table]:
    """Every table that has rows, by name."""
    made = {
        "baseline": _baseline(report),
        "skipped": _skipped(report),
        "not_followed": _not_followed(report),
        "passes": _passes(report),
        "not_covered": _reasons(report, "not_covered", "Rules about what no run did"),
        "not_applicable": _reasons(
            report, "not_applicable", "Rules about features that the script does not have"
        ),
        "losses": _by_step(report, "losses", "Loss of each step"),
        "grad_norms": _by_step(
            report, "grad_norms", "Norm of the whole gradient in each step, before clipping"
        ),
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
    return f"{run['role']}, {count(run['world_size'], 'rank')}"


def place(location: Report, folder: str) -> str:
    """`file:line in function`, the file relative to the folder in which the script was run."""
    file = Path(location["file"])
    seen = file.relative_to(folder) if folder and file.is_relative_to(folder) else file
    return f"{seen}:{location['line']}" + (
        f" in {location['function']}" if location["function"] else ""
    )


def offset(report: Report, run: Report) -> int:
    """The number of steps before the first step of a run."""
    return int(report["facts"].get("saved_after_step") or 0) if ROLES[run["role"]].resumes else 0


def curves(report: Report) -> list[Report]:
    """The runs whose losses are comparable."""
    return [
        r
        for r in report["runs"]
        if any(v is not None for v in r["losses"])
        and not r.get("skipped_steps")
        and ROLES[r["role"]].compared_with
    ]


def number(value: float | None, digits: int = 3) -> str | None:
    """A number for a cell."""
    if value is None:
        return None
    return (
        f"{value:,.0f}"
        if isinstance(value, int) or abs(value) >= 10**digits
        else f"{value:.{digits}g}"
    )


def size(count: int | None) -> str | None:
    """Bytes in a binary unit."""
    if count is None:
        return None
    unit, power = next(
        ((u, p) for u, p in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if count >= 1 << p), ("B", 0)
    )
    return f"{count / (1 << power):.1f} {unit}" if power else f"{count} B"


def _with(report: Report, status: str) -> list[Report]:
    return [finding for finding in report["findings"] if finding["status"] == status]


def _passes(report: Report) -> Table:
    rows = []
    for f in _with(report, "pass"):
        margin = f["margin"] and (
            f"{f['margin']:,.0f}x" if f["margin"] >= 10 else f"{f['margin']:.1f}x"
        )
        rows.append([f["rule"], f["evidence"], number(f["measured"]), number(f["limit"]), margin])
    return Table(
        "Rules that passed, with their evidence", "Rule|Evidence|>Measured|>Limit|>Margin", rows
    )


def _reasons(report: Report, status: str, title: str) -> Table:
    rows = [[f["rule"], f["evidence"]] for f in _with(report, status)]
    return Table(title, "Rule|Reason", rows)


def _baseline(report: Report) -> Table:
    held, cwd = report.get("baseline", {}), report["target"].get("cwd", "")
    states = {
        "new": "new",
        "standing": "known (in baseline)",
        "gone": "gone",
        "unjudged": "not judged",
    }
    found = [
        (state, one["rule"], one["location"])
        for kind, state in states.items()
        for one in held.get(kind, [])
    ]
    rows = [
        [rule, state, place(location, cwd) if location else None] for state, rule, location in found
    ]
    return Table("Failures compared with the earlier report", "Rule|Now|At", rows)


def _skipped(report: Report) -> Table:
    rows = [[skip["rule"], skip["reason"], skip["until"]] for skip in report["skipped"]]
    return Table("Rules that were not judged", "Rule|Reason|Until", rows)


def _step_cells(
    values: list[float | None], after: int, last: int, digits: int = 3
) -> list[str | None]:
    """A cell for each of the first STEPS steps; `after`: the steps before the first value."""
    cells = [None] * after + [number(value, digits) for value in values]
    return [cells[k] if k < len(cells) else None for k in range(min(last, STEPS))]


def _with_steps(caption: str, columns: str, rows: list[list[Any]], last: int) -> Table:
    """A table whose last columns are the steps up to `last`."""
    steps = "".join(f"|>Step {step}" for step in range(1, min(last, STEPS) + 1))
    note = f"{last - STEPS} more steps are in --report json=PATH." if last > STEPS else ""
    return Table(caption, columns + steps, rows, note)


def _by_step(report: Report, field: str, caption: str) -> Table:
    runs = [(run, offset(report, run)) for run in curves(report)]
    last = max((after + len(run[field]) for run, after in runs), default=0)
    rows = [[label(run), *_step_cells(run[field], after, last, 7)] for run, after in runs]
    return _with_steps(caption, "Run", rows, last)


def _apart(report: Report, field: str, caption: str) -> Table:
    found = report["facts"].get("comparisons", [])
    last = max((c["after_step"] + len(c[field]) for c in found), default=0)
    rows = []
    for one in found:
        run, oracle = (label(report["runs"][one[key]]) for key in ("run", "oracle"))
        cells = _step_cells(one[field], one["after_step"], last)
        rows.append(
            [
                f"{run} against {oracle}",
                one["rule"] or "sets the limit",
                number(one["allowed"][field]),
                *cells,
            ]
        )
    return _with_steps(f"{caption}, by step", "Run|Judged by|>Allowed", rows, last)


def _shards(report: Report) -> Table:
    facts = report["facts"]
    ranks, shards = facts.get("ranks", []), facts.get("shards", [])
    if all(len(set(shard["elements"])) == 1 for shard in shards):
        held = [f"Each of {len(ranks)} ranks" if len(ranks) > 1 else "Rank 0"]
    elif len(ranks) <= WIDE and len(ranks) * len(shards) <= CELLS:
        held = [f"Rank {rank}" for rank in ranks]
    else:
        held = ["Least on a rank", "Most on a rank"]
        shards = [{**shard, "elements": _span(shard["elements"])} for shard in shards]
    rows = []
    for shard in shards:
        shape = " x ".join(map(str, shard["shape"])) or "scalar"
        dtype = shard["dtype"] + ("" if shard["trainable"] else ", frozen")
        group = "none" if shard["group"] is None else shard["group"] or "(root)"
        placed = ", ".join(shard["placements"]) or "plain tensor"
        rows.append(
            [
                shard["name"],
                shape,
                dtype,
                placed,
                group,
                *map(number, shard["elements"][: len(held)]),
            ]
        )
    columns = "Parameter|>Shape|Dtype|Placement|Group" + "".join(f"|>{title}" for title in held)
    return Table("Elements of each parameter on each rank", columns, rows)


def _span(counts: list[int | None]) -> list[int]:
    known = [count for count in counts if count is not None]
    return [min(known), max(known)]


def _memory(report: Report) -> Table:
    found = report["facts"].get("memory", [])
    cuda = any(row["process"]["cuda"] is not None for row in found)
    rows = []
    for row in found:
        own = [row[kind] for kind in ("parameters", "gradients", "optimizer")]
        measured = [row["process"][kind] for kind in ("before", "peak", "cuda")[: 2 + cuda]]
        rows.append([f"{row['rank']}", *map(size, own + measured)])
    columns = (
        "Rank|>Parameters|>Gradients|>Optimizer state|>Process, before the script|>Process, peak"
    )
    return Table(
        "Memory of each rank that was run", columns + ("|>CUDA, peak" if cuda else ""), rows
    )


def _traffic(report: Report) -> Table:
    counted, expected = (
        report["facts"].get("traffic", {}),
        report["facts"].get("expected_traffic", {}),
    )
    seen = {
        key.removesuffix(f"_{where}")
        for where in ("model", "script")
        for key in counted
        if key.endswith(where)
    }
    rows = []
    for kind in sorted(seen | {kind for kind, times in expected.items() if times}):
        row: list[Any] = [kind, number(expected.get(kind, 0))]
        for where in ("model", "script"):
            times, moved = (counted.get(f"{kind}_{where}{what}", 0) for what in ("", "_bytes"))
            row += [number(times), size(moved or None)]
        rows.append(row)
    columns = "Collective|>Expected|>Counted in forward and backward|>Bytes"
    columns += "|>Called by the script itself|>Bytes of these"
    return Table("Collectives of one step on rank 0", columns, rows)


def _saved(report: Report) -> Table:
    rows = []
    for one in report["facts"].get("checkpoints", []):
        wrong = f"{one['wrong']} tensors differ from what was saved"
        state = {
            "opened": wrong if one["wrong"] else "all equal to what was saved",
            "closed": f"could not be opened: {one['error']}",
            "gone": "removed by the script since",
        }.get(one["state"], one["state"])
        rows.append(
            [one["path"], one["after_step"], one["op"], one["ranks"], one["tensors"], state]
        )
    columns = "Saved to|>After step|By|>Ranks|>Tensors|Opened"
    return Table("Saved checkpoints, opened again by another process", columns, rows)


def _returned(report: Report) -> Table:
    apart = {
        c["run"]: c for c in report["facts"].get("comparisons", []) if c["rule"] and c["after_step"]
    }
    rows, damaged = [], False
    for one in report["facts"].get("returns", []):
        run, compared = (
            report["runs"][one["run"]],
            apart.get(one["run"], {"loss": [], "allowed": {"loss": None}}),
        )
        damaged = damaged or run["role"] == "damaged"
        ended = "completed" if run["completed"] else "stopped"
        worst = max((value for value in compared["loss"] if value is not None), default=None)
        loads, what = ", ".join(one["loads"]) or None, run["note"] or ROLES[run["role"]].title
        rows.append(
            [
                label(run),
                what,
                loads,
                ended,
                one["steps"],
                number(worst),
                number(compared["allowed"]["loss"]),
            ]
        )
    columns = "Run|What was done|Loads|End|>Steps|>Largest difference of the loss|>Allowed"
    note = "A resume from a damaged checkpoint passes if it stops." if damaged else ""
    return Table("Runs that resumed from the checkpoints", columns, rows, note)


def _runs(report: Report) -> Table:
    rows = []
    for run in report["runs"]:
        codes = ", ".join(f"{rank}: {code}" for rank, code in run["exit"].items() if code)
        end = ("completed" if run["completed"] else "did not complete") + (
            f"; exit by rank {codes}" if codes else ""
        )
        about = [
            label(run),
            run["note"] or ROLES[run["role"]].title,
            f"{run['seconds']:.1f}",
            len(run["losses"]),
        ]
        rows.append([*about, end, run["command"] or None])
    return Table("Runs that were made", "Run|What it is|>Seconds|>Steps|End|Command", rows)


def _not_followed(report: Report) -> Table:
    found, cwd = (
        report["facts"].get("sources", {"not_followed": ()})["not_followed"],
        report["target"].get("cwd", ""),
    )
    rows = [
        [o["callee"], place({**o, "function": ""}, cwd), o["calls"], o["reason"]] for o in found
    ]
    return Table("Calls that could not be followed", "Callee|At|>Calls|Why", rows)


def _environment(report: Report) -> Table:
    values = {**report["environment"], **report["target"]}
    known = {
        key.replace("_", " "): value for key, value in values.items() if value not in ("", [], None)
    }
    rows = [
        [key, ", ".join(map(str, v)) if isinstance(v, list) else str(v)] for key, v in known.items()
    ]
    return Table("Environment and arguments", "Name|Value", rows)

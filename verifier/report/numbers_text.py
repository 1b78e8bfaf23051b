"""The numbers of the report for a terminal: how many findings of each status, losses of each step,
the sharding, the collectives.
"""

from collections.abc import Iterator

from ..analysis.wording import count
from ..finding import Status
from ..trace.roles import ROLES
from ..verdict import Verdict
from .wrapping import width, wrapped

_CELL = 12


def counts(verdict: Verdict) -> str:
    """`36 passed, 59 not applicable, 12 runs in 23 s`."""
    words: dict[Status, str] = {
        "fail": "failed",
        "error": "",
        "inconclusive": "not checked",
        "pass": "passed",
    }
    words |= {"not_covered": "not covered", "not_applicable": "not applicable"}
    there = {status: verdict.counts[status] for status in words if status in verdict.counts}
    parts = [
        f"{n} {words[status]}" if words[status] else count(n, "error")
        for status, n in there.items()
    ]
    warnings = verdict.counts.get("warning", 0)
    parts += [count(warnings, "warning")] if warnings else []
    parts += [f"{len(verdict.skipped)} skipped"] if verdict.skipped else []
    runs = (
        f"{count(len(verdict.runs), 'run')} in {verdict.seconds:.0f} s"
        if verdict.runs
        else "nothing was run"
    )
    return ", ".join([*(parts or ["no findings"]), runs])


def losses(verdict: Verdict) -> Iterator[str]:
    """The loss of each step in each run, as many steps beside each other as fit; a resumed run
    begins after its checkpoint.
    """
    runs = [
        r
        for r in verdict.runs
        if any(loss is not None for loss in r["losses"])
        and not r.get("skipped_steps")
        and ROLES[r["role"]].compared_with
    ]
    if not runs:
        return
    after = verdict.facts.get("saved_after_step") or 0
    rows: dict[str, list[list[str]]] = {}
    for run in runs:
        cells = [""] * (after if ROLES[run["role"]].resumes else 0) + [
            _loss(value) for value in run["losses"]
        ]
        rows.setdefault(f"  {run['role']}, {count(run['world_size'], 'rank')}", []).append(cells)
    size = max(map(len, rows)) + 1
    steps = max(len(cells) for group in rows.values() for cells in group)
    beside = max(1, (width() - size) // _CELL)
    for start in range(0, steps, beside):
        block = range(start, min(start + beside, steps))
        yield from (
            "",
            f"{'loss of step':<{size}}" + "".join(f"{step + 1:>{_CELL}}" for step in block),
        )
        for name, group in rows.items():
            for cells in group:
                row = "".join(f"{cell:>{_CELL}}" for cell in cells[start : block.stop])
                yield f"{name:<{size}}{row}".rstrip()


def facts(verdict: Verdict) -> Iterator[str]:
    """The sharding, and the collectives of one step: those of forward and backward apart from those
    that the script calls.
    """
    facts = verdict.facts
    if "mesh" not in facts:
        return
    sizes = [
        str(size) if str(name).isdigit() else f"{name}={size}"
        for name, size in facts["mesh"].items()
    ]
    yield ""
    yield from wrapped(
        f"{facts['sharded']} of {facts['parameters']} parameters sharded over a mesh of"
        f" {' x '.join(sizes) or 'no ranks'} in {count(facts['groups'], 'group')}; at most"
        f" {facts['largest_share']:.1%} of {facts['elements']:,} elements on one rank; updates"
        f" {'reduce' if facts['reduces_loss'] else 'do not reduce'} the loss to first order"
    )
    if not (traffic := facts["traffic"]):
        return
    parts = []
    for where, name in (("model", "forward and backward"), ("script", "the rest of the step")):
        kinds = [key.removesuffix(f"_{where}") for key in traffic if key.endswith(f"_{where}")]
        calls = [
            f"{traffic[f'{k}_{where}']:.0f} {k} ({traffic[f'{k}_{where}_bytes']:,.0f} bytes)"
            for k in kinds
        ]
        parts.append(f"{name}: {', '.join(calls) or 'none'}")
    forwards = count(int(traffic["fsdp_forwards"]), "FSDP forward")
    if micros := facts.get("traffic_by_micro_batch"):
        each = (f"{kind} {', '.join(map(str, numbers))}" for kind, numbers in micros.items())
        parts.append(f"by micro-batch, in forward and backward: {'; '.join(each)}")
    yield from wrapped(f"collectives of one step, {forwards}: {'; '.join(parts)}")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"

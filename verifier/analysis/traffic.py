"""Collectives of a step: counted, and expected from the wrapping."""

from itertools import pairwise

from ..trace import Run
from ..trace.events import Traffic

SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def traffic(run: Run) -> dict[str, float]:
    """The counts and bytes of a rank's collectives in the last counted step, for a report."""
    if (last := _last(run)) is None:
        return {}
    out: dict[str, float] = {"fsdp_forwards": last.calls}
    for kind in sorted(last.model.keys() | last.script.keys()):
        for caller, found in (("model", last.model), ("script", last.script)):
            if kind in found:
                out[f"{kind}_{caller}"], out[f"{kind}_{caller}_bytes"] = found[kind]
    return out


def expected(run: Run) -> dict[str, int]:
    """How often each kind should be called in forward and backward of that step, if all groups run
    once a micro-batch.
    """
    last = _last(run)
    return dict(last.expected) if last is not None else {}


def by_micro_batch(run: Run) -> dict[str, list[int]]:
    """{kind: how often it was called in forward and backward of each micro-batch} of that step; {}
    where it has one.
    """
    last = _last(run)
    if last is None or len(last.micros) < 2:
        return {}
    totals = [{}, *last.micros]
    kinds = sorted(last.micros[-1])
    return {
        k: [after.get(k, 0) - before.get(k, 0) for before, after in pairwise(totals)] for k in kinds
    }


def _last(run: Run) -> Traffic | None:
    return next(reversed(run.places(Traffic)), None)


def whole_bytes(run: Run, name: str) -> int:
    entry = run.parameters[name][0]
    return int(entry.numel) * SIZE.get(entry.dtype, 4)

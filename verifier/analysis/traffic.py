"""Collectives of a step: counted, and expected from the wrapping."""

from __future__ import annotations

from ..trace import Run
from ..trace.events import Traffic

SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def traffic(run: Run) -> dict[str, float]:
    """What one step costs a rank: the counts and bytes of collectives in the last counted step, for a report."""
    counted = list(run.places(Traffic))
    if not counted:
        return {}
    last = counted[-1]
    callers = {"model": last.model, "script": last.script}
    kinds = sorted(last.model.keys() | last.script.keys())
    out: dict[str, float] = {"fsdp_forwards": last.calls}
    for kind in kinds:
        for caller, found in callers.items():
            if kind in found:
                out[f"{kind}_{caller}"], out[f"{kind}_{caller}_bytes"] = found[kind]
    return out


def expected(run: Run) -> dict[str, int]:
    """How often each kind should be called in forward and backward of that step, if all groups run once a micro-batch."""
    counted = list(run.places(Traffic))
    return dict(counted[-1].expected) if counted else {}


def whole_bytes(run: Run, name: str) -> int:
    entry = run.parameters[name][0]
    return int(entry.numel) * SIZE.get(entry.dtype, 4)

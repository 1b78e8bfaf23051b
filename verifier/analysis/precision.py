"""Low precision: the dtypes, and which one a run computes in."""

from __future__ import annotations

from ..trace import Run
from ..trace.events import Autocast, Shard

LOW = ("bfloat16", "float16")


def low_precision(run: Run) -> str | None:
    """The low dtype in which a run computes, by FSDP's policy or by autocast; None if there is none."""
    policy = next((r.param_dtype for r in run.places(Shard) if r.param_dtype in LOW), None)
    autocast = next((r.dtype for r in run.places(Autocast) if r.dtype in LOW), None)
    return policy or autocast

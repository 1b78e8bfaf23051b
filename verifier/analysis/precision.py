"""Low precision: the dtypes, which one a run computes in, and whether an oracle can be compared
with it.
"""

from ..trace import Run
from ..trace.events import Autocast, Inexact, Shard

# The dtypes whose rounding hides a fault: the run is repeated in float32 for the oracles.
LOW = ("bfloat16", "float16")


def low_precision(run: Run) -> str | None:
    """The low dtype in which a run computes, by FSDP's policy or by autocast; None if there is
    none.
    """
    dtypes = [*(r.param_dtype for r in run.places(Shard)), *(r.dtype for r in run.places(Autocast))]
    return next((dtype for dtype in dtypes if dtype in LOW), None)


def needs_full_precision(train: Run) -> bool:
    """Whether low-precision compute, autocast or dropout stands between this run and an oracle."""
    low = any(r.param_dtype in LOW for r in train.places(Shard))
    return low or bool(train.all(Inexact))

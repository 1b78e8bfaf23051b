"""Low precision: the dtypes, and which one a run computes in."""

from ..trace import Run
from ..trace.events import Autocast, Shard

LOW = ("bfloat16", "float16")


def low_precision(run: Run) -> str | None:
    """The low dtype in which a run computes, by FSDP's policy or by autocast; None if there is none."""
    dtypes = [*(r.param_dtype for r in run.places(Shard)), *(r.dtype for r in run.places(Autocast))]
    return next((dtype for dtype in dtypes if dtype in LOW), None)

"""Groups that compute in low precision."""

from __future__ import annotations

from ...analysis.precision import LOW
from ...trace import Run
from ...trace.events import Shard

NO_LOW = "no group computes in low precision"


def low_groups(run: Run, *dtypes: str) -> list[Shard]:
    """The calls of fully_shard with a param_dtype in `dtypes`, by default any low one."""
    return [record for record in run.places(Shard) if record.param_dtype in (dtypes or LOW)]

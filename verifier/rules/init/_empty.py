"""Memory that `to_empty` allocates."""

from __future__ import annotations

from ...trace import Run
from ...trace.events import ToEmpty

NOT_FILLED = "no run with NaN in the memory that to_empty allocates came to a forward"


def not_emptied(run: Run) -> str:
    """Why rules on `to_empty` do not apply to a run that has come to a forward; "" if it was called before."""
    called = any(trace.first(ToEmpty) is not None for trace in run.traces)
    return "" if called else "the script allocates nothing with to_empty before its first forward"

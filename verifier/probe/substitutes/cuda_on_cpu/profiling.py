"""What would look at kernels: profilers leave CUDA out, ranges have no effect, and what is compiled
runs in eager mode.
"""

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ...dispatcher import Call
from ...session import Session
from ._answers import always, answer


def _without_cuda(call: Call) -> None:
    asked: Any = call.kwargs.get("activities")
    if asked is not None:
        call.kwargs["activities"] = [one for one in asked if one != ProfilerActivity.CUDA] or [
            ProfilerActivity.CPU
        ]


def _in_eager_mode(call: Call) -> None:
    """torch.compile skips frames below a dispatch mode, and with `fullgraph` that is an error."""
    call.kwargs["fullgraph"] = False


def install(session: Session) -> None:
    """Patch `torch.profiler.profile`, `torch.cuda.nvtx` and `torch.compile`."""
    session.around("torch:compile", before=_in_eager_mode)
    session.around("torch.profiler:profile.__init__", before=_without_cuda)
    session.around(
        "torch.profiler:supported_activities",
        replace=lambda call, _: {ProfilerActivity.CPU},
        optional=True,
    )
    answer(
        session,
        "torch.cuda.nvtx",
        dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), always(0)),
    )
    torch.cuda.nvtx.range = torch.profiler.record_function  # type: ignore[assignment]

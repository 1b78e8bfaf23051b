"""Averages by gloo on versions of torch whose gloo sums instead, and `PREMUL_SUM`, which only NCCL
has.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..compat import names
from ..compat.cuda import premul_factor
from ..dispatcher import Call
from ..session import Session

Proceed = Callable[[], Any]
_REDUCED = {  # (the position of the input, that of op)
    "all_reduce": (0, 1),
    "reduce": (0, 2),
    "reduce_scatter_tensor": (1, 2),
    "reduce_scatter_single": (1, 2),
    "reduce_scatter": (1, 2),
}


def install(session: Session) -> None:
    """Reduce as NCCL does."""
    for name, where in _REDUCED.items():
        session.around(f"torch.distributed:{name}", replace=_reduced(where), optional=True)


def _reduced(where: tuple[int, int]) -> Callable[[Call, Proceed], Any]:
    """PREMUL_SUM, and on versions whose gloo does not average AVG too, is the sum of what is
    multiplied before.
    """

    def replaced(call: Call, proceed: Proceed) -> Any:
        position, at = where
        op = call.given(at, "op")
        average, weighted = (
            op == dist.ReduceOp.AVG,
            op == dist.ReduceOp.PREMUL_SUM,
        )  # only `op ==` compares their kinds
        # gloo of torch up to 2.8 sums for AVG: averaged here, so that a script for NCCL is judged
        # as on NCCL (torch 2.7.1 and 2.8 (gloo sums instead of averaging)).
        if not (average or weighted) or (average and names.averages(torch.__version__)):
            return proceed()
        factor = (
            1 / dist.get_world_size(call.given(at + 1, "group")) if average else premul_factor(op)
        )
        if position == 0:
            call.given(0, "tensor").mul_(factor)
        elif len(call.args) > 1:
            given = call.args[1]
            scaled = [one * factor for one in given] if isinstance(given, list) else given * factor
            call.args = (call.args[0], scaled, *call.args[2:])
        else:
            call.kwargs |= {
                key: call.kwargs[key] * factor for key in ("input",) if key in call.kwargs
            }
        if len(call.args) > at:
            call.args = (*call.args[:at], dist.ReduceOp.SUM, *call.args[at + 1 :])
        else:
            call.kwargs["op"] = dist.ReduceOp.SUM
        return proceed()

    return replaced

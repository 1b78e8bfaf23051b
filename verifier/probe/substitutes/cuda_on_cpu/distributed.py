"""NCCL by gloo: groups answer with the backend that the script asked for, and reduce by what only NCCL has."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ....launch.average import RIGHT
from ...compat.cuda import premul_factor
from ...dispatcher import Call
from ...session import Session
from .. import gloo_for_nccl
from ._answers import always, answer

Proceed = Callable[[], Any]
_REDUCED = {  # (the position of the input, that of op)
    "all_reduce": (0, 1),
    "reduce": (0, 2),
    "reduce_scatter_tensor": (1, 2),
    "reduce_scatter_single": (1, 2),
    "reduce_scatter": (1, 2),
}
_asked: dict[int, str] = {}  # id of a group -> its backend; 0: the whole world


def _named(backend: Any) -> str:
    """What `get_backend` answers on a machine with GPUs: the text that `init_process_group` was given; without one, the default."""
    return str(backend or "undefined").lower()


def _started(call: Call, proceed: Proceed) -> Any:
    backend = call.given(0, "backend")
    result = proceed()
    _asked[0] = _named(backend)
    return result


def _grouped(call: Call, proceed: Proceed) -> Any:
    backend = call.given(2, "backend")
    call.kwargs.pop("pg_options", None)
    group = proceed()
    _asked[id(group)] = _named(backend) if backend is not None else _asked.get(0, "nccl")
    return group


def _backend(call: Call, proceed: Proceed) -> Any:
    group = call.given(0, "group")
    real = proceed()  # also raises where there is no group
    return (
        _asked.get(0 if group in (None, dist.group.WORLD) else id(group), _asked.get(0, real))
        if real != "fake"
        else real
    )


def _reduced(where: tuple[int, int]) -> Callable[[Call, Proceed], Any]:
    """PREMUL_SUM, and on versions whose gloo does not average AVG too, is the sum of what is multiplied before."""

    def replaced(call: Call, proceed: Proceed) -> Any:
        position, at = where
        op = call.given(at, "op")
        average, weighted = op == dist.ReduceOp.AVG, op == dist.ReduceOp.PREMUL_SUM  # only `op ==` compares their kinds
        if not (average or weighted) or (average and torch.__version__.partition("+")[0] in RIGHT):
            return proceed()
        factor = 1 / dist.get_world_size(call.given(at + 1, "group")) if average else premul_factor(op)
        if position == 0:
            call.given(0, "tensor").mul_(factor)
        elif len(call.args) > 1:
            given = call.args[1]
            scaled = [one * factor for one in given] if isinstance(given, list) else given * factor
            call.args = (call.args[0], scaled, *call.args[2:])
        else:
            call.kwargs |= {key: call.kwargs[key] * factor for key in ("input",) if key in call.kwargs}
        if len(call.args) > at:
            call.args = (*call.args[:at], dist.ReduceOp.SUM, *call.args[at + 1 :])
        else:
            call.kwargs["op"] = dist.ReduceOp.SUM
        return proceed()

    return replaced


def _met(call: Call, proceed: Proceed) -> Any:
    call.kwargs.pop("device_ids", None)
    return proceed()


def install(session: Session) -> None:
    """Replace NCCL."""
    answer(session, "torch.distributed", {"is_nccl_available": always(True)})
    session.around("torch.distributed:init_process_group", replace=_started)
    session.around("torch.distributed:new_group", replace=_grouped)
    session.around("torch.distributed:get_backend", replace=_backend)
    session.around("torch.distributed:barrier", replace=_met)
    for name, where in _REDUCED.items():
        session.around(f"torch.distributed:{name}", replace=_reduced(where), optional=True)
    gloo_for_nccl.install(session)

"""NCCL by gloo: groups answer with the backend that the script asked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ...dispatcher import Call
from ...session import Session
from .. import gloo_for_nccl
from ._answers import always, answer

Proceed = Callable[[], Any]
_asked: dict[int, str] = {}  # id of a group -> its backend; 0: the whole world


class ProcessGroupNCCL:
    """Stands in for NCCL's groups where torch was built without it: no group is one."""

    class Options:
        """Options of a group, which are not used."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


def _named(backend: Any) -> str:
    """What `get_backend` answers on a machine with GPUs: the text that `init_process_group` was
    given; without one, the default.
    """
    return str(backend or "undefined").lower()


def _started(call: Call, proceed: Proceed) -> Any:
    backend = call.given(0, "backend")
    call.kwargs.pop("pg_options", None)
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
    return _asked.get(0 if group in (None, dist.group.WORLD) else id(group), _asked.get(0, real))


def _met(call: Call, proceed: Proceed) -> Any:
    call.kwargs.pop("device_ids", None)
    return proceed()


def install(session: Session) -> None:
    """Replace NCCL."""
    for module in (dist, dist.distributed_c10d):
        vars(module).setdefault("ProcessGroupNCCL", ProcessGroupNCCL)  # a build for CPUs has none
    answer(session, "torch.distributed", {"is_nccl_available": always(True)})
    session.around("torch.distributed:init_process_group", replace=_started)
    session.around("torch.distributed:new_group", replace=_grouped)
    session.around("torch.distributed:get_backend", replace=_backend)
    session.around("torch.distributed:barrier", replace=_met)
    gloo_for_nccl.install(session)

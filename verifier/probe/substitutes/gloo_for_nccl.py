"""Replaces every backend by gloo, which also carries CUDA tensors, when ranks share a GPU: NCCL
does not allow it.
"""

from collections.abc import Callable
from typing import Any

from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    """From now on every process group of this process is one of gloo."""

    def started(call: Call, proceed: Callable[[], Any]) -> Any:
        call.args, call.kwargs = ("gloo", *call.args[1:]), _without(call, "backend", "device_id")
        return proceed()

    def grouped(call: Call, proceed: Callable[[], Any]) -> Any:
        call.args, call.kwargs = call.args[:2], {**_without(call, "device_id"), "backend": "gloo"}
        return proceed()

    session.around("torch.distributed:init_process_group", replace=started)
    session.around("torch.distributed:new_group", replace=grouped)


def _without(call: Call, *names: str) -> dict[str, Any]:
    """The keyword arguments without these: a `device_id` would bind the group to NCCL."""
    return {name: value for name, value in call.kwargs.items() if name not in names}

"""Where NCCL refuses that ranks share a GPU: gloo carries the CUDA tensors, whatever backend the script asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    """From now on every process group of this process is one of gloo."""

    def started(call: Call, proceed: Callable[[], Any]) -> Any:
        rest = {
            k: v for k, v in call.kwargs.items() if k not in ("backend", "device_id")
        }  # the device would bind it to NCCL
        call.args, call.kwargs = ("gloo", *call.args[1:]), rest
        return proceed()

    def grouped(call: Call, proceed: Callable[[], Any]) -> Any:
        rest = {key: value for key, value in call.kwargs.items() if key != "device_id"}
        call.args, call.kwargs = call.args[:2], {**rest, "backend": "gloo"}
        return proceed()

    session.dispatcher.around("torch.distributed:init_process_group", replace=started)
    session.dispatcher.around("torch.distributed:new_group", replace=grouped)

"""Switches off mixed precision, autocast and dropout, so that runs can be compared.

The request asks for all three (`full_precision`) or for dropout alone (`dropless`), whose masks
differ between world sizes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..compat import tensors
from ..dispatcher import Call
from ..events.precision import DROPOUTS, is_active
from ..session import Session

LOW = (torch.bfloat16, torch.float16)


def install(session: Session) -> None:
    """Switch off what the request names."""
    around = session.around
    if session.request.full_precision or session.request.dropless:
        for name, (key, position) in DROPOUTS.items():
            around(f"torch.nn.functional:{name}", replace=_without(key, position))
    if session.request.full_precision:
        around("torch:autocast.__init__", after=lambda call: tensors.turn_off(call.args[0]))
        around("torch.distributed.fsdp:fully_shard", before=_widened, replace=_sharded)


def _without(key: str, position: int) -> Callable[[Call, Callable[[], Any]], Any]:
    """A dropout whose rate is 0."""

    def dropped(call: Call, proceed: Callable[[], Any]) -> Any:
        if is_active(call, key, position):
            if len(call.args) > position:
                call.args = (*call.args[:position], 0.0, *call.args[position + 1 :])
            else:
                call.kwargs = {**call.kwargs, key: 0.0}
        return proceed()

    return dropped


def _widened(call: Call) -> None:
    """Hold frozen parameters in float32 where FSDP, or DDP in its place, will not cast the trained
    ones to their type any more.
    """
    policy, given = call.kwargs.get("mp_policy"), call.given(0, "module")
    if policy is None or policy.param_dtype not in LOW:
        return
    for module in given if isinstance(given, list | tuple) else [given]:
        for param in module.parameters():
            # A frozen base in bfloat16 is held in float32 there: LoRA on it stopped with an error
            # of mixed types (LoRA on a base in bfloat16).
            if param.dtype in LOW and not param.requires_grad and not isinstance(param, DTensor):
                param.data = param.data.float()


def _sharded(call: Call, proceed: Callable[[], Any]) -> Any:
    if "mp_policy" in call.kwargs:
        call.kwargs["mp_policy"] = MixedPrecisionPolicy()
    return proceed()

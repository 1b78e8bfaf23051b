"""Pinned memory: a mark on the storage of a copy, since nothing is there that reads the pages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...compat.tensors import NO_STORAGE
from ...dispatcher import Call
from ...session import Session
from .marks import PINNED, PLAIN, device_of

Proceed = Callable[[], Any]


def pinned(tensor: Any) -> Any:
    """Mark what was made with `pin_memory=True`. Raises RuntimeError for what lies on CUDA."""
    if device_of(tensor).type == "cuda":
        raise RuntimeError("Only dense CPU tensors can be pinned")
    setattr(tensor.untyped_storage(), PINNED, True)
    return tensor


def _is_pinned(call: Call, proceed: Proceed) -> bool:
    try:
        return bool(getattr(call.args[0].untyped_storage(), PINNED, False))
    except NO_STORAGE:
        return False


def _pinned_copy(call: Call, proceed: Proceed) -> Any:
    """`Tensor.pin_memory`: a copy, or the tensor itself if its memory is pinned."""
    tensor: Tensor = call.args[0]
    # the parts of a DTensor or of a nested tensor lie where they are
    if type(tensor) not in PLAIN or _is_pinned(call, proceed):
        return tensor
    if tensor.is_cuda:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return pinned(tensor.clone())


def install(session: Session) -> None:
    """Answer for tensors."""
    session.around("torch:Tensor.pin_memory", replace=_pinned_copy)
    session.around("torch:Tensor.is_pinned", replace=_is_pinned)

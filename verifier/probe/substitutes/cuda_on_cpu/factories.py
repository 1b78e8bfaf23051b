"""Functions that make tensors: a device may be a number, and what copies data in C++ is placed
here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat.names import CONSTRUCTORS, need
from ...dispatcher import Call
from ...session import Session
from .marks import CPU, device_from, device_of, mark_of, put
from .pinned import pinned

_FROM_DATA = ("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_csr_tensor")
_LIKE = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


def _made(call: Call, proceed: Callable[[], Any]) -> Any:
    """What lies on the device that is asked for, on that of its inputs or on the default one; else
    on the CPU.
    """
    asked = call.kwargs.get("device")
    if isinstance(asked, int):
        call.kwargs["device"] = asked = device_from(asked)
    found = proceed()
    drawn_by = getattr(call.kwargs.get("generator"), "device", None)
    if drawn_by is not None and drawn_by.type != (
        there := device_of(found).type
    ):  # in C++ both are the CPU
        raise RuntimeError(
            f"Expected a '{there}' device type for generator but found '{drawn_by.type}'"
        )
    if isinstance(found, Tensor) and (
        mark_of(found) is None or (asked is not None and device_from(asked) == CPU)
    ):
        put(found, CPU)
    return pinned(found) if call.kwargs.get("pin_memory") else found


def _from_data(call: Call, proceed: Callable[[], Any]) -> Any:
    """A tensor of the data, first on the CPU."""
    data, asked = call.given(0, "data"), call.kwargs.get("device")
    target = (
        torch.empty(0).device
        if asked is None and not isinstance(data, Tensor)
        else device_from(asked)
    )
    # C++ would pin it before the dispatch mode sees it
    pins = call.kwargs.pop("pin_memory", False)
    if target is None or target.type != "cuda":
        found = _made(call, proceed)
        return pinned(found) if pins else found
    call.kwargs["device"] = CPU
    return proceed().to(target)


def _new_tensor(call: Call, proceed: Callable[[], Any]) -> Any:
    asked, pins = call.kwargs.pop("device", None), call.kwargs.pop("pin_memory", False)
    there = device_of(call.args[0]) if asked is None else device_from(asked) or CPU
    found = put(proceed(), there)
    return pinned(found) if pins else found


def install(session: Session) -> None:
    """Patch every function that takes `device=`."""
    names = {function.__name__ for function in need(CONSTRUCTORS)()} - {*_FROM_DATA}
    for name in (*sorted(names), *_LIKE):
        session.around(f"torch:{name}", replace=_made, optional=True)
    for name in _NEW:
        session.around(f"torch:Tensor.{name}", replace=_made)
    for name in ("from_numpy", "frombuffer"):
        session.around(f"torch:{name}", replace=_made)
    for name in _FROM_DATA:
        session.around(f"torch:{name}", replace=_from_data)
    session.around("torch:Tensor.new_tensor", replace=_new_tensor)

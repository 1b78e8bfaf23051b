"""Autocast and attention: `autocast("cuda")` is the CPU's with CUDA's dtype and operators; the
backend MATH is never left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias

from ...compat.autocast import cast_as_cuda
from ...compat.operators import empty_subclass
from ...dispatcher import Call
from ...session import Session
from ._answers import always

_from_local = DTensor.from_local  # not a call of the script
_kept: list[Any] = []  # what lives as long as the process
_FLAGS = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


def _began(call: Call) -> None:
    """`autocast(device_type, dtype=None, ...)`: float16 is CUDA's dtype."""
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    given = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs}
    if str(given.get("device_type")).partition(":")[0] != "cuda":
        return
    dtype = torch.float16 if given.get("dtype") is None else given["dtype"]
    call.args, call.kwargs = call.args[:1], {**given, "device_type": "cpu", "dtype": dtype}


def _of_cpu(call: Call, proceed: Callable[[], Any]) -> Any:
    """The same of the CPU; without a device, that of CUDA."""
    if not call.args or isinstance(call.args[0], bool):
        call.args = ("cpu", *call.args)
    elif call.args[0] == "cuda":
        call.args = ("cpu", *call.args[1:])
    return proceed()


def _with_math(call: Call) -> None:
    """`sdpa_kernel` without the backends that only a GPU has would leave none."""
    asked = call.given(0, "backends")
    found = [*(asked if isinstance(asked, list | tuple) else [asked]), SDPBackend.MATH]
    call.args, call.kwargs = (
        (found, *call.args[1:]),
        {k: v for k, v in call.kwargs.items() if k != "backends"},
    )


def _attended(call: Call, proceed: Callable[[], Any]) -> Any:
    """Attention on DTensors, for which only the kernels of GPUs have strategies: on the parts,
    where each is whole.
    """
    q, k, v = (call.given(at, name) for at, name in enumerate(("query", "key", "value")))
    if not isinstance(q, DTensor) or any(
        not isinstance(x, DTensor) or x.placements != q.placements for x in (k, v)
    ):
        return proceed()
    if any(
        not (place.is_replicate() or place.is_shard(0) or place.is_shard(1))
        for place in q.placements
    ):
        return proceed()  # sharded along the sequence
    call.args = (q.to_local(), k.to_local(), v.to_local(), *call.args[3:])
    call.kwargs = {
        name: value for name, value in call.kwargs.items() if name not in ("query", "key", "value")
    }
    return _from_local(proceed(), q.device_mesh, q.placements, run_check=False)


def install(session: Session) -> None:
    """Let autocast and its flags work on the CPU's."""
    _kept.append(cast_as_cuda())
    session.around("torch:autocast.__init__", before=_began)
    for name in _FLAGS:
        session.around(f"torch:{name}", replace=_of_cpu, optional=True)
    session.around(
        "torch:get_autocast_gpu_dtype",
        replace=lambda call, proceed: torch.get_autocast_dtype("cpu"),
        optional=True,
    )
    session.around("torch.nn.functional:scaled_dot_product_attention", replace=_attended)
    CausalBias.__new__ = lambda cls, *args, **kwargs: empty_subclass(cls)  # type: ignore[assignment, method-assign]
    session.around("torch.nn.attention:sdpa_kernel", before=_with_math)
    session.around("torch.backends.cuda:enable_math_sdp", replace=always(None))
    session.around(
        "torch.backends.cuda:is_flash_attention_available", replace=always(True), optional=True
    )

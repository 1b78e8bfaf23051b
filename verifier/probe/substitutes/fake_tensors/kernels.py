"""Operators of which CUDA has other kernels than the CPU, with other memory: attention, RMS norm,
dropout, autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias

from ...compat.operators import efficient_attention, flash_attention, fused_norm
from ...compat.tensors import local
from ...dispatcher import Call
from ...session import Session
from ..cuda_on_cpu.marks import device_of

_WIDEST = 256  # of a head in flash attention
_HALF = (torch.float16, torch.bfloat16)


def install(session: Session) -> None:
    """Choose as CUDA does."""
    functional = "torch.nn.functional"
    session.around(f"{functional}:scaled_dot_product_attention", replace=_attended)
    session.around(f"{functional}:dropout", replace=_dropped)
    session.around(f"{functional}:rms_norm", replace=_normed)


def _on_cuda(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and device_of(value).type == "cuda"


def _attended(call: Call, proceed: Callable[[], Any]) -> Any:
    q, k, v = (call.given(at, name) for at, name in enumerate(("query", "key", "value")))
    mask, drop, causal = (
        call.given(3, "attn_mask"),
        call.given(4, "dropout_p", 0.0),
        call.given(5, "is_causal", False),
    )
    if not all(_on_cuda(one) for one in (q, k, v)) or q.dim() != 4 or isinstance(mask, CausalBias):
        return proceed()
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        q, k, v = (one.to(low) if one.is_floating_point() else one for one in (q, k, v))
    return attended(q, k, v, mask, drop, causal, call.kwargs.get("scale"))


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    drop: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """By the kernel that CUDA takes for these."""
    if q.dtype in _HALF and mask is None and q.shape[-1] <= _WIDEST and q.shape[-1] == v.shape[-1]:
        return flash_attention(q, k, v, drop, causal, scale)
    if q.shape[-3] != k.shape[-3]:  # groups of queries: the kernel with masks has none
        k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return efficient_attention(q, k, v, mask, drop, causal, scale)


def _dropped(call: Call, proceed: Callable[[], Any]) -> Any:
    value, p = call.given(0, "input"), call.given(1, "p", 0.5)
    training, inplace = call.given(2, "training", True), call.given(3, "inplace", False)
    if inplace or not training or not p or not _on_cuda(value):
        return proceed()
    return torch.native_dropout(value, p, True)[0]


def _normed(call: Call, proceed: Callable[[], Any]) -> Any:
    value, weight = call.given(0, "input"), call.given(2, "weight")
    both = [value] if weight is None else [value, weight]
    if not all(map(_on_cuda, both)) and not all(
        isinstance(one, DTensor) and _on_cuda(local(one)) for one in both
    ):
        return proceed()
    if torch.is_autocast_enabled("cpu"):
        value, weight = value.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype != value.dtype:
        return proceed()
    found = fused_norm(value, list(call.given(1, "normalized_shape")), weight, call.given(3, "eps"))
    return proceed() if found is None else found

"""Collectives: each returns at once, and is recorded with its group, the bytes of the whole tensor
and its dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...capacity.recorder import Recorder
from ...compat.names import RESOLVE_GROUP, need
from ...compat.operators import is_process_group, schema, tensors_in
from .storage import is_hollow

SMALL = 1 << 24  # bytes of known values that are really exchanged
_KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def is_collective(func: Any) -> bool:
    """Whether an operator is one of torch.distributed."""
    return getattr(func, "namespace", "") in (
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
    )


def communicate(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Callable[[], Any]
) -> Any:
    """The result of a collective. `execute` gives that of a functional one on shapes."""
    name = schema(func).name.partition("::")[2]
    if func.namespace != "c10d":
        result = execute()
        if (kind := _FUNCTIONAL.get(name)) is not None:
            size = max(_bytes(list(tensors_in(args))), _bytes(list(tensors_in((result,)))))
            group = next((value for value in reversed(args) if isinstance(value, str)), "")
            Recorder.now.collective(kind, need(RESOLVE_GROUP)(group), size, _dtype(args))
        return result
    if (kind := _KINDS.get(name)) is not None:
        boxed = next(
            one
            for one in (*args, *kwargs.values())
            if isinstance(one, torch.ScriptObject) and is_process_group(one)
        )
        sides = [_bytes(list(tensors_in((value,)))) for value in args]
        Recorder.now.collective(
            kind, dist.ProcessGroup.unbox(boxed), max(sides, default=0), _dtype(args)
        )
    given = list(tensors_in(args))
    if _bytes(given) <= SMALL and not any(is_hollow(one) for one in given):
        return func(*args, **kwargs)  # such as pickled objects
    return _with_own(func(*map(_small, args), **kwargs), args)


def _with_own(result: Any, args: Any) -> Any:
    """The result of the collective on empty tensors, with the tensors of the script in their
    places.
    """
    if not isinstance(result, tuple | list):
        return result
    return type(result)(args[0] if position == 0 else part for position, part in enumerate(result))


def _small(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ops.aten.empty.memory_format([0], dtype=value.dtype)
    if isinstance(value, list | tuple):  # those of numbers are the parts of an all-to-all
        return type(value)(_small(item) for item in value if not isinstance(item, int))
    return value


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dtype(args: Any) -> str:
    return next((str(one.dtype).removeprefix("torch.") for one in tensors_in(args)), "")

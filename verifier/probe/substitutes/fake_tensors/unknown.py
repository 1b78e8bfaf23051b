"""What a script gets where it asks for a value that is unknown: a stand-in, which is recorded with
its line.

A number is 1 (a loss of 1.0, one token), a truth is False (nothing overflowed), but for `all`.
Operators whose values give the size of their result give as much as they can: `nonzero` finds every
element, `bincount` as many of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...capacity.recorder import Recorder
from .storage import hollow, is_hollow

_CALLED = {"_local_scalar_dense": "item()", "is_nonzero": "bool()"}
_TRUE = frozenset(("equal", "allclose", "is_same_size"))
_YES = frozenset(("all", "isfinite"))
_VALUES = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
# the host waits for the size of the result
SIZED = frozenset(("nonzero", "masked_select", "_unique2", "unique_consecutive"))


def note(name: str) -> None:
    """Record that a value of CUDA is read."""
    if name in _VALUES or name in SIZED or name == "repeat_interleave" or " " in name:
        Recorder.now.read(_CALLED.get(name, name), True)


def sized(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the size of the result."""
    return name in SIZED or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def number(name: str, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
    """The result of an operator that returns no tensor."""
    if name not in _VALUES:
        return func(*args, **kwargs)  # it depends on shapes alone
    if name in _TRUE:
        return True
    dtype = given[0].dtype
    if dtype is torch.bool or name == "is_nonzero":
        return False
    return 1.0 if dtype.is_floating_point else complex(1) if dtype.is_complex else 1


def single(name: str, shape: Tensor) -> Tensor:
    """The stand-in for a tensor of one element."""
    value = name in _YES if shape.dtype is torch.bool else 1
    filled: Tensor = torch.ops.aten.full.default(shape.size(), value, dtype=shape.dtype)
    return filled


def _every(tensor: Tensor) -> Tensor:
    return hollow((tensor.numel(), tensor.dim()), (1, max(tensor.numel(), 1)), torch.int64)


def places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices without boolean masks: the places that a mask selects, or all of them if its values
    are unknown.
    """
    found: list[Tensor | None] = []
    for one in indices:
        if one is None or one.dtype is not torch.bool:
            found.append(one)
        else:
            found += (
                _every(one) if is_hollow(one) else torch.ops.aten.nonzero.default(one)
            ).unbind(1)
    return found


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    size = max(tensor.numel(), mask.numel())
    return hollow((size,), (1,), tensor.dtype)


def _counted(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many of each: a router that balances its experts."""
    return _balanced(
        tensor.numel(), max(minlength, 1), torch.int64 if weights is None else weights.dtype
    )


def _added(tensor: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Integers that are counted by `scatter_add`, as the tokens of each expert are."""
    if tensor.dim() != 1 or tensor.is_floating_point():
        return NotImplemented
    return _balanced(index.numel(), tensor.numel(), tensor.dtype)


def _histogram(tensor: Tensor, bins: int = 100, *bounds: Any) -> Tensor:
    return _balanced(tensor.numel(), bins, tensor.dtype)


def _balanced(total: int, parts: int, dtype: torch.dtype) -> Tensor:
    each, rest = divmod(total, parts)
    counts: Tensor = torch.ops.aten.full.default([parts], each, dtype=dtype)
    torch.ops.aten.add_.Scalar(counts[:rest], 1)
    return counts


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat = hollow((tensor.numel(),), (1,), tensor.dtype)
    index = hollow(tensor.shape, tensor.contiguous().stride(), torch.int64)
    return flat, index, hollow((tensor.numel(),), (1,), torch.int64)


def _repeated(repeats: Tensor, output_size: int | None = None) -> Tensor:
    size = output_size if output_size is not None else repeats.numel()
    return hollow((size,), (1,), torch.int64)


def _copied_in(
    inputs: Any, output: Tensor, splits: Any, size: int, rank: int
) -> tuple[Tensor, Tensor]:
    return output.narrow(0, size * rank, size), output


RESULTS: dict[str, Callable[..., Any]] = {
    "nonzero": _every,
    "masked_select": _selected,
    "bincount": _counted,
    "histc": _histogram,
    "scatter_add": _added,
    "_unique2": _unique,
    "unique_consecutive": _unique,
    "repeat_interleave": _repeated,
    "all_gather_copy_in": _copied_in,
}

"""Tensors without memory: they lie in one reserved range of addresses of which no page is ever
touched.

A hollow tensor is a CPU tensor with shape, strides, dtype, storage and data pointer, so autograd,
autocast, FSDP2 and DTensor treat it as any other. What reads it by mistake finds zeros. Only views
and changes of shape run on it; all else is computed on shapes (operators.py).
"""

import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import MachineRefuses

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x40 if sys.platform == "darwin" else 0x4000)
_SIZES = (1 << 45, 1 << 42, 1 << 38)  # bytes of addresses: as many as this process may have
_ALIGNED = 64
_META = torch.device("meta")
_frombuffer = torch.frombuffer
_empty_strided = torch.ops.aten.empty_strided.default


class _Range:
    """The range of addresses.

    Tensors get one after the other; at its end it begins anew, since nothing is stored there.
    """

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.size = self.first = self.end = self.next = 0

    def reserve(self) -> mmap.mmap:
        """Reserve the addresses, at the first use."""
        for size in _SIZES:
            try:
                self.memory = mmap.mmap(
                    -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                )
            except OSError:
                continue
            self.size, self.next = size, _ALIGNED
            self.first = _frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
            self.end = self.first + size
            return self.memory
        raise MachineRefuses(f"no {_SIZES[-1] >> 30} GiB of addresses can be reserved (ulimit -v)")


_RANGE = _Range()


def is_hollow(tensor: Tensor) -> bool:
    """Whether a plain CPU tensor has no memory."""
    return tensor.layout is torch.strided and _RANGE.first <= tensor.data_ptr() < _RANGE.end


def hollow(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor without memory."""
    count = 1
    for length, step in zip(size, stride, strict=True):
        count += (length - 1) * step
        if length == 0:
            none: Tensor = _empty_strided(size, stride, dtype=dtype)
            return none
    memory = _RANGE.memory or _RANGE.reserve()
    needed = count * dtype.itemsize
    if _RANGE.next + needed > _RANGE.size:
        _RANGE.next = _ALIGNED
        if needed > _RANGE.size:
            raise MachineRefuses(
                f"one tensor of {needed >> 30} GiB is larger than the addresses of this process"
            )
    at, _RANGE.next = _RANGE.next, _RANGE.next + (needed + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    return _frombuffer(memory, dtype=dtype, count=count, offset=at).as_strided(size, stride)


def shape_of(tensor: Tensor) -> Tensor:
    """A meta tensor of the same shape, strides and dtype."""
    shape: Tensor = _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
    return shape


def lies_in_range(address: int) -> bool:
    """Whether an address is one of a hollow tensor."""
    return _RANGE.first <= address < _RANGE.end

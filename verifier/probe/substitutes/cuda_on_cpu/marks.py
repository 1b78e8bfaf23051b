"""Where the script has placed a tensor: a mark on its storage, which views, `detach` and `.data`
share.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.cuda import TENSOR_DEVICE, inner_tensor, note_initialized
from ...compat.tensors import NO_STORAGE

CPU = torch.device("cpu")
MARK = "fsdp2_device"
PINNED = "fsdp2_pinned"  # on the storage of pages that CUDA would pin
VARIABLE = "CUDA_VISIBLE_DEVICES"
PLAIN = (Tensor, nn.Parameter)


class Watch:
    """What is informed of the devices of tensors; by default, nothing is."""

    def placed(self, tensor: Tensor, storage: Any, device: torch.device) -> None:
        """A tensor was placed on a device."""

    def moved(self, tensor: Tensor, target: torch.device, waits: bool) -> None:
        """A tensor is copied from CUDA to the CPU; the host waits for it, or not."""

    def held(self) -> int | None:
        """Bytes of tensors on CUDA; None if they are not counted."""
        return None

    def peak(self) -> int | None:
        """The most of them."""
        return None

    def reset(self) -> None:
        """Begin the peak anew."""


watch = Watch()


@dataclass
class Cuda:
    """The state of CUDA in this process."""

    current: int = 0
    initialized: bool = False
    # the script copies a tensor to another device: an operation that asks for the CPU means it
    moving: bool = False
    # at least so many devices has a node: one process of a script sees those of all ranks of the
    # train run, as it would on that machine (pyFSDP2 leaves where it counts one device)
    of_node: int = 0
    _visible: int | None = None  # as they were counted when CUDA was first used

    def begin(self) -> None:
        """CUDA is used from now on."""
        if not self.initialized:
            self._visible = self.count
            self.initialized = True
            note_initialized()

    @property
    def count(self) -> int:
        """One device for each rank of this node, or those of them that CUDA_VISIBLE_DEVICES leaves.

        The script may set that until CUDA is used; later it has no effect.
        """
        if self._visible is not None:
            return self._visible
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        there = max(ranks, self.of_node)
        chosen = os.environ.get(VARIABLE)
        return there if chosen is None else _left_by(chosen, there)


def _left_by(chosen: str, there: int) -> int:
    """How many of `there` devices a list of numbers leaves: those before the first that is none or
    that is not there; with one named twice, none.
    """
    found: list[int] = []
    for entry in chosen.split(","):
        number = int(entry) if entry.strip().isdigit() else there
        if number in found:
            return 0
        if number >= there:
            break
        found.append(number)
    return len(found)


CUDA = Cuda()


def device_from(value: Any) -> torch.device | None:
    """What names a device as a device; CUDA without a number is the current one. None for None."""
    if value is None:
        return None
    device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    if device.type != "cuda":
        return device
    CUDA.begin()
    index = CUDA.current if device.index is None else device.index
    if index >= CUDA.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal ({index}; this node has {CUDA.count})"
        )
    return torch.device("cuda", index)


def mark_of(tensor: Tensor) -> torch.device | None:
    """The device on which a CPU tensor was placed; None if that is not known, as for what C++ has
    made.
    """
    if type(tensor) not in PLAIN and (inner := inner_tensor(tensor)) is not None:
        return mark_of(inner)
    try:
        return getattr(tensor.untyped_storage(), MARK, None)
    except NO_STORAGE:
        return None


def put(tensor: Any, device: torch.device) -> Any:
    """Mark a tensor, or the local part of a DTensor, as placed on `device`."""
    if type(tensor) not in PLAIN and (inner := inner_tensor(tensor)) is not None:
        put(inner, device)
    elif TENSOR_DEVICE(tensor).type == "cpu":
        with contextlib.suppress(*NO_STORAGE):
            storage = tensor.untyped_storage()
            setattr(storage, MARK, device)
            watch.placed(tensor, storage, device)
    return tensor


def keep(source: Any, copy: Any) -> Any:
    """Hand the mark of a storage on to its copy."""
    if (device := getattr(source, MARK, None)) is not None:
        setattr(copy, MARK, device)
    return copy


def device_of(tensor: Tensor) -> torch.device:
    """What `Tensor.device` answers."""
    real: torch.device = TENSOR_DEVICE(tensor)
    return (mark_of(tensor) or real) if real.type == "cpu" else real

"""Storages of hollow tensors: their size is a number.

FSDP2 frees and allocates gathered parameters by `resize_`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...capacity.recorder import NUMBER, Recorder
from ...dispatcher import Call
from ...session import Session
from ..cuda_on_cpu.marks import Watch
from .storage import lies_in_range

SIZE = "fsdp2_size"


class Counting(Watch):
    """What marks of devices report (cuda_on_cpu/marks.py)."""

    def placed(self, tensor: Tensor, storage: Any, device: torch.device) -> None:
        """A tensor was placed on a device."""
        if device.type == "cuda":
            Recorder.now.placed(tensor, storage)

    def moved(self, tensor: Tensor, target: torch.device, waits: bool) -> None:
        """A tensor is copied from CUDA to the CPU."""
        Recorder.now.read(f"copy to the {target.type.upper()}", waits)

    def held(self) -> int:
        """Bytes of tensors on CUDA."""
        return Recorder.now.total

    def peak(self) -> int:
        """The most of them since the script last asked for a new count."""
        return Recorder.now.most

    def reset(self) -> None:
        """Begin the peak anew."""
        Recorder.now.most = Recorder.now.total


def install(session: Session) -> None:
    """Answer and count the sizes of storages."""

    def resized(call: Call, proceed: Callable[[], Any]) -> Any:
        storage, size = call.args[0], int(call.given(1, "size"))
        number = getattr(storage, NUMBER, None)
        if number is not None:
            Recorder.now.resized(number, size)
        if not lies_in_range(storage.data_ptr()):
            return proceed()
        setattr(storage, SIZE, size)
        return storage

    def size(call: Call, proceed: Callable[[], Any]) -> Any:
        known = getattr(call.args[0], SIZE, None)
        return proceed() if known is None else known

    def copied(call: Call, proceed: Callable[[], Any]) -> Any:
        return call.args[0] if lies_in_range(call.args[0].data_ptr()) else proceed()

    session.around("torch:UntypedStorage.resize_", replace=resized)
    for name in ("size", "nbytes"):
        session.around(f"torch:UntypedStorage.{name}", replace=size)
    for name in ("clone", "copy_"):
        session.around(f"torch:UntypedStorage.{name}", replace=copied)

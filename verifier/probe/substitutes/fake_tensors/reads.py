"""Values that leave tensors other than by an operator: lists, arrays, text."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...capacity.recorder import Recorder
from ...dispatcher import Call
from ...session import Session
from ..cuda_on_cpu.marks import device_of
from .storage import is_hollow


def install(session: Session) -> None:
    """Record them, and give stand-ins."""

    def listed(call: Call, proceed: Callable[[], Any]) -> Any:
        tensor = call.args[0]
        if type(tensor) is not Tensor:
            return proceed()
        if device_of(tensor).type == "cuda":
            Recorder.now.read("tolist()", True)
        return _ones(tensor) if is_hollow(tensor) else proceed()

    def shown(call: Call, proceed: Callable[[], Any]) -> Any:
        tensor = call.args[0]
        if tensor.numel() and tensor.dim() and type(tensor) is Tensor and is_hollow(tensor):
            return f"tensor({tuple(tensor.shape)}, dtype={tensor.dtype}, without values)"
        return proceed()

    session.around("torch:Tensor.tolist", replace=listed)
    session.around("torch:Tensor.__repr__", replace=shown)


def _ones(tensor: Tensor) -> Any:
    one: Any = 1.0 if tensor.is_floating_point() else 1

    def nested(shape: tuple[int, ...]) -> Any:
        return [nested(shape[1:]) for _ in range(shape[0])] if shape else one

    return nested(tuple(tensor.shape))

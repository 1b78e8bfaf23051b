"""What CUDA on the CPU needs of torch's private names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .names import (
    ACCELERATOR,
    CURRENT_MODE,
    DTENSOR_PART,
    FAKE_MODE,
    FAKE_TENSOR,
    KERNELS,
    NESTED_PART,
    WAITED_PART,
    find,
)

TENSOR_DEVICE: Callable[[Any], torch.device] = Tensor.device.__get__


FakeTensor, _current_mode, _FAKE = find(FAKE_TENSOR), find(CURRENT_MODE), find(FAKE_MODE)


@contextmanager
def without_modes() -> Iterator[None]:
    """Operations of the probe on plain tensors, which no mode sees: CUDA on the CPU would double
    their time, and `torch.set_default_device("cuda")` make new tensors where no mode serves them.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def inner_tensor(tensor: Tensor) -> Tensor | None:
    """The plain tensor in a DTensor, in a nested or quantised one, or in the result of a collective
    that is not waited for.
    """
    # Not by the attribute alone: in a DDP run each tensor answers as its own local part.
    other = NESTED_PART if tensor.layout is torch.jagged else WAITED_PART
    found = getattr(tensor, DTENSOR_PART if isinstance(tensor, DTensor) else other, None)
    if found is None and hasattr(
        type(tensor), "__tensor_flatten__"
    ):  # which may ask for the device itself
        found = next((value for value in vars(tensor).values() if isinstance(value, Tensor)), None)
    return found if isinstance(found, Tensor) else None


def classes_have_a_say() -> bool:
    """Whether torch asks the class of a tensor what a function does: not inside of what that class
    answers.
    """
    return bool(torch._C._is_torch_function_enabled())


def note_initialized() -> None:
    """Let activation checkpointing and others see that CUDA is used."""
    torch.cuda._initialized = True


def answer_workspaces() -> None:
    """Let `torch._C._cuda_clearCublasWorkspaces` be called: there are none."""
    torch._C._cuda_clearCublasWorkspaces = lambda: None  # type: ignore[attr-defined, unused-ignore]


def answer_accelerator(device: torch.device) -> None:
    """Let torch's own modules find this accelerator."""
    for name in ACCELERATOR:
        if hasattr(torch._C, name):
            setattr(torch._C, name, lambda *args: device)


def answer_numbers(device_from: Callable[[Any], torch.device | None]) -> None:
    """Let `to(0)` of modules, and of libraries that parse it as modules do, mean a device: C++
    knows its number where there is one.
    """
    real: Any = torch._C._nn._parse_to

    def parsed(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (device_from(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = device_from(kwargs["device"])
        return real(*args, **kwargs)

    torch._C._nn._parse_to = parsed


def premul_factor(op: Any) -> float:
    """The factor of `ReduceOp.PREMUL_SUM`."""
    return float(op.__getstate__()[1])


def answer_groups(device_of: Callable[[Tensor], torch.device]) -> None:
    """Let optimizers and clipping group tensors by `device_of`, where C++ knows the CPU alone."""
    real: Any = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        found = real(lists, with_indices)
        return {
            (device_of(group[0][0][0]) if group[0][0] else device, dtype): group
            for (device, dtype), group in found.items()
        }

    torch._C._group_tensors_by_device_and_dtype = grouped  # type: ignore[assignment]


def is_fake(types: Sequence[type]) -> bool:
    """Whether an operation on tensors of these types works on shapes alone."""
    return _current_mode(_FAKE) is not None or FakeTensor in types


def kernel_of(operator: Any) -> Callable[..., Any] | None:
    """What a higher-order operator calls for CUDA, if that is a function of Python."""
    kernels: dict[Any, Callable[..., Any]] = getattr(operator, KERNELS, None) or {}
    return kernels.get(torch._C.DispatchKey.CUDA)

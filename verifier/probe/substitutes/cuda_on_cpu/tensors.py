"""Tensors that move between devices, and what they answer about the one on which they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat.cuda import answer_groups, answer_numbers, classes_have_a_say
from ...compat.names import WRAPPER
from ...dispatcher import Call
from ...session import Session
from . import marks
from .marks import CPU, CUDA, device_from, device_of, keep, put

Proceed = Callable[[], Any]
_WRAPPED_ON = 7  # the position of `device` in `_make_wrapper_subclass`


def _to(call: Call, proceed: Proceed) -> Any:
    """`Tensor.to`, whose first argument may be a device, a dtype or another tensor."""
    tensor, *rest = call.args
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        call.kwargs.setdefault("dtype", other.dtype)
        target: torch.device | None = device_of(other)
        rest = [None, None, *rest]  # device, dtype
    elif rest and isinstance(rest[0], torch.dtype):
        target = None
        call.kwargs["dtype"] = rest.pop(0)
        rest = [None, None, *rest]
    else:
        target = device_from(rest[0] if rest else call.kwargs.get("device"))
    for name, value in zip(("device", "dtype", "non_blocking", "copy"), rest, strict=False):
        if value is not None:
            call.kwargs[name] = value
    call.args = (tensor,)
    waits = not call.kwargs.pop("non_blocking", False)
    if call.kwargs.get("dtype", ...) is None:
        del call.kwargs["dtype"]
    return _moved(call, proceed, target, waits)


def _moved(call: Call, proceed: Proceed, target: torch.device | None, waits: bool) -> Any:
    """What `proceed`, a call of `Tensor.to` with names only, gives on `target`."""
    tensor = call.args[0]
    call.kwargs.pop("device", None)
    if target is None or target.type not in ("cpu", "cuda"):
        if target is not None:
            call.kwargs["device"] = target
        return proceed()
    here = device_of(tensor)
    if here == target:
        return proceed() if call.kwargs else tensor
    if target.type == "cpu":
        marks.watch.moved(tensor, target, waits)
    inside = tensor.layout is torch.jagged or _has_its_own(tensor)
    moved = _copied(call, proceed, target if inside else CPU)
    if not inside:
        put(moved, target)
    if moved.requires_grad and not moved.is_leaf:  # the gradient goes the way back
        moved.register_hook(lambda gradient: gradient.to(here))
    return moved


def _has_its_own(tensor: Tensor) -> bool:
    """Whether a tensor is of a library's class that has functions of torch of its own."""
    own = getattr(type(tensor).__torch_function__, "__func__", None)
    default = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return tensor.layout is not torch.jagged and own is not None and own is not default


def _copied(call: Call, proceed: Proceed, target: torch.device) -> Any:
    """A copy: what its parts ask for, the values and offsets of a nested tensor too, lies on
    `target`, not where the tensor lies.
    """
    cls, call.kwargs["device"] = type(call.args[0]), target
    if not _has_its_own(call.args[0]):
        call.kwargs["copy"] = True
    elif classes_have_a_say():  # it knows `to` under the name that it has now
        return cls.__torch_function__(Tensor.to, (cls,), call.args, call.kwargs)
    CUDA.moving = True
    try:
        return proceed()
    finally:
        CUDA.moving = False


def _asked_for(device: Any, tensor: Tensor, options: dict[str, Any]) -> Any:
    return tensor.to(device, **{k: v for k, v in options.items() if k == "memory_format"})


def _cuda(call: Call, proceed: Proceed) -> Any:
    device = call.given(1, "device")
    return _asked_for("cuda" if device is None else device_from(device), call.args[0], call.kwargs)


def _cpu(call: Call, proceed: Proceed) -> Any:
    return _asked_for(CPU, call.args[0], call.kwargs)


def _type(call: Call, proceed: Proceed) -> Any:
    """`Tensor.type`, whose names of types say the device, too: `torch.cuda.FloatTensor`."""
    tensor, wanted = call.args[0], call.given(1, "dtype")
    if wanted is None:
        name = str(proceed())
        return (
            name.replace("torch.", "torch.cuda.", 1) if device_of(tensor).type == "cuda" else name
        )
    if not isinstance(wanted, str):
        return proceed()
    dtype = getattr(torch, wanted.rpartition(".")[2]).dtype
    return tensor.to("cuda" if wanted.startswith("torch.cuda.") else CPU, dtype)


def _numpy(call: Call, proceed: Proceed) -> Any:
    if (device := device_of(call.args[0])).type == "cuda":
        how = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise TypeError(f"can't convert {device} device type tensor to numpy. {how}")
    return proceed()


def _wrapped(call: Call, proceed: Proceed) -> Any:
    """A tensor around another one lies where that one really is."""
    device = call.given(_WRAPPED_ON, "device")
    if device is not None and torch.device(device).type == "cuda":
        if len(call.args) > _WRAPPED_ON:
            call.args = (*call.args[:_WRAPPED_ON], CPU, *call.args[_WRAPPED_ON + 1 :])
        else:
            call.kwargs["device"] = CPU
    return proceed()


def install(session: Session) -> None:
    """Patch the methods and properties of tensors and storages."""
    around = session.around
    around("torch:Tensor.to", replace=_to)
    around("torch:Tensor.cuda", replace=_cuda)
    around("torch:Tensor.cpu", replace=_cpu)
    around("torch:Tensor.type", replace=_type)
    around(
        "torch:Tensor.type_as",
        replace=lambda call, proceed: call.args[0].to(call.given(1, "other")),
    )
    around("torch:Tensor.numpy", replace=_numpy)
    around(WRAPPER, replace=_wrapped)
    around("torch:Tensor.get_device", replace=lambda call, proceed: _number(call.args[0]))
    around(
        "torch:UntypedStorage.clone", replace=lambda call, proceed: keep(call.args[0], proceed())
    )
    answer_groups(device_of)
    answer_numbers(device_from)
    Tensor.device = property(device_of)  # type: ignore[assignment]
    Tensor.is_cuda = property(lambda tensor: device_of(tensor).type == "cuda")  # type: ignore[assignment]
    Tensor.is_cpu = property(lambda tensor: device_of(tensor).type == "cpu")  # type: ignore[assignment]


def _number(tensor: Tensor) -> int:
    index = device_of(tensor).index
    return -1 if index is None else index

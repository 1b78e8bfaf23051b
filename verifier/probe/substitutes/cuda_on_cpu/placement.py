"""The dispatch mode below all of torch: results lie where their inputs lie, or on CUDA where that
is asked for.

Only a function that Python calls puts a mark of the CPU on what it makes (factories.py): C++ asks
for the CPU by itself in a backward, where it copies the options of a tensor. So a tensor that is
marked as on the CPU was left there by the script.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat.cuda import TorchDispatchMode, is_fake, kernel_of
from ...compat.operators import composed, is_composite, tensors_in
from ...dispatcher import Call
from ...session import Session
from .marks import CPU, CUDA, PLAIN, device_from, mark_of, put
from .randomness import drawn

# Operations that a GPU refuses for inputs on two devices, except for numbers (tensors without
# dims).
_TOGETHER = frozenset(
    (
        *(
            "add",
            "sub",
            "mul",
            "div",
            "add_",
            "sub_",
            "mul_",
            "div_",
            "where",
            "masked_fill",
            "masked_fill_",
            "cat",
        ),
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "embedding",
            "convolution",
            "native_layer_norm",
            "nll_loss_forward",
        ),
        *(
            "gather",
            "scatter",
            "index_select",
            "mse_loss",
            "lt",
            "gt",
            "eq",
            "ne",
            "le",
            "ge",
            "stack",
        ),
    )
)


# What executes an operator in its place: (operator, its tensors, the device of its result,
# *arguments).
execute: Callable[..., Any] | None = None


class Placement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the results of every operation."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Pages are pinned for a GPU, of which there is none: pinned.py marks them (simpler-fsdp).
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        asked = kwargs.get("device")
        wanted = (
            device_from(asked)
            if asked is not None and (asked.type == "cuda" or CUDA.moving)
            else None
        )
        if wanted is not None:
            kwargs["device"] = CPU
        if is_fake(types):
            return func(*args, **kwargs)  # shapes alone
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # of subclasses, the operations on their parts
        if (kernel := kernel_of(func)) is not None:
            with self:
                return kernel(*args, **kwargs)
        if execute is not None and wanted is None and is_composite(func):
            with self:
                return composed(func, args, kwargs)
        given = list(tensors_in((*args, *kwargs.values())))
        marks = [mark_of(tensor) for tensor in given]
        there = wanted or next(
            (mark for mark in marks if mark is not None and mark.type == "cuda"), None
        )
        if wanted is None and there is not None and _name(func) in _TOGETHER:
            _refuse_two_devices(given, marks, there)
        run = func if execute is None else functools.partial(execute, func, given, there)
        if there is not None and _is_random(func) and kwargs.get("generator") is None:
            result = drawn(there, run, args, kwargs)
        else:
            result = run(*args, **kwargs)
        if there is None and given and None not in marks:
            there = CPU
        if there is not None:
            unseen = not hasattr(
                func, "overloadpacket"
            )  # a higher-order operator, whose parts were not seen
            for tensor in tensors_in((result,)):
                if wanted is not None or unseen or mark_of(tensor) is None:
                    put(tensor, there)
        return result


def install(session: Session) -> None:
    """Enter the mode, in this thread and in those that it starts."""
    Placement().__enter__()  # type: ignore[no-untyped-call]

    def started(call: Call, proceed: Any) -> Any:
        with Placement():  # type: ignore[no-untyped-call]
            return proceed()

    session.around("threading:Thread.run", replace=started)


def _refuse_two_devices(
    given: list[Tensor], marks: list[torch.device | None], there: torch.device
) -> None:
    """Raise what a GPU raises if some inputs were left on the CPU."""
    for tensor, mark in zip(given, marks, strict=True):
        if mark is not None and mark != there and tensor.dim() > 0:
            message = (
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" {there} and {mark}!"
            )
            raise RuntimeError(message)


@functools.cache
def _name(func: Any) -> str:
    packet = getattr(func, "overloadpacket", None)
    return str(getattr(packet, "__name__", "")) if getattr(func, "namespace", "") == "aten" else ""


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())

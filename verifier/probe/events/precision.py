"""Low precision and randomness: dropout and autocast, FSDP's cast of forward inputs, a loss
scaler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...trace.events import Autocast, Inexact, LossyCast, Scaler
from ..compat import tensors
from ..dispatcher import Call
from ..measures import class_name, dtype_name, short_name
from ..session import Session

# the dropouts of torch.nn.functional, with the name and the position of their rate
DROPOUTS = {
    **dict.fromkeys(
        (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
        ),
        ("p", 1),
    ),
    "scaled_dot_product_attention": ("dropout_p", 4),
}
_LOW = (torch.bfloat16, torch.float16)
_FORWARDS = 16  # of one module whose inputs are checked
# Above 2^24 float32 itself loses whole numbers: a cast from there loses nothing more.
_WHOLE = float(1 << 24)  # up to here float32 holds every whole number


def install(session: Session) -> None:
    """Subscribe to dropout and autocast in every run; to casts and scalers in runs of the script as
    it is.
    """
    plain = session.request.mode != "ddp" and not session.request.full_precision

    def inexact(what: str) -> None:
        if session.first(("inexact", what)):
            session.write(Inexact(what=what))

    def constructed(call: Call) -> None:
        context = call.args[0]
        if tensors.autocast_is_on(context):
            inexact("autocast")
            if plain and session.first("autocast"):
                session.write(Autocast(dtype=dtype_name(context.fast_dtype)))

    def sharded(call: Call) -> None:
        policy = call.kwargs.get("mp_policy")
        low = getattr(policy, "param_dtype", None)
        if low in _LOW and getattr(policy, "cast_forward_inputs", False):
            given = call.given(0, "module")
            for module in given if isinstance(given, list | tuple) else [given]:
                _watch_inputs(session, module, low)

    def scaled(call: Call) -> None:
        if call.args[0].is_enabled() and session.first("scaler"):
            session.write(Scaler(cls=class_name(call.args[0])))

    watch_dropouts(session, lambda given: inexact("dropout"))
    session.around("torch:autocast.__init__", after=constructed)
    if plain:
        session.around("torch.distributed.fsdp:fully_shard", after=sharded)
        session.around("torch.amp:GradScaler.scale", before=scaled)


def watch_dropouts(session: Session, dropped: Callable[[torch.Tensor], None]) -> None:
    """Call `dropped` with the input of each call of a dropout that is active."""

    def called(call: Call, key: str, position: int) -> None:
        if is_active(call, key, position):
            dropped(call.given(0, "input" if key == "p" else "query"))

    for name, (key, position) in DROPOUTS.items():
        session.around(
            f"torch.nn.functional:{name}",
            before=functools.partial(called, key=key, position=position),
        )


def is_active(call: Call, key: str, position: int) -> bool:
    """Whether a dropout, whose rate is the argument `key`, drops anything."""
    rate = call.given(position, key, 0.5 if key == "p" else 0.0)
    return bool(rate) and (key != "p" or bool(call.given(2, "training", True)))


def _watch_inputs(session: Session, module: nn.Module, low: torch.dtype) -> None:
    """Check the inputs of `module` before FSDP casts them."""
    checked = 0

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal checked
        if torch.compiler.is_compiling() or checked >= _FORWARDS or session.progress.in_backward:
            return
        checked += 1
        try:
            for value in tensors.tensors((args, kwargs)):
                if (lost := lost_whole_numbers(value, low)) is not None:
                    checked = _FORWARDS
                    changed, was, now = lost
                    event = LossyCast(
                        cls=short_name(module),
                        shape=list(value.shape),
                        dtype=dtype_name(low),
                        changed=changed,
                        was=was,
                        now=now,
                        at_line=session.here(),
                    )
                    session.write(event)
                    return
        except Exception as error:
            session.report("precision.check", error)

    module.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def lost_whole_numbers(value: torch.Tensor, low: torch.dtype) -> tuple[int, float, float] | None:
    """(elements changed by a cast to `low`, the first of them, its value after) of a tensor of
    counts, positions or times.

    Only tensors of whole numbers from 0 up are checked: a mask of large negative numbers may be
    rounded.
    """
    with torch.no_grad():
        part = tensors.local(value)
        wide = part.dtype in (torch.float32, torch.float64)
        if value.requires_grad or not wide or part.numel() == 0 or part.layout != torch.strided:
            return None
        # Only counts, positions and times are checked: a mask of large negative numbers may be
        # rounded.
        if not bool(((part >= 0) & (part <= _WHOLE) & (part == part.round())).all()):
            return None
        cast = part.to(low).to(part.dtype)
        wrong = cast != part
        number = int(wrong.sum())
        return (number, float(part[wrong][0]), float(cast[wrong][0])) if number else None

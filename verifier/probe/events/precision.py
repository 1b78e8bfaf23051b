"""What low precision does: dropout and autocast, FSDP's cast of forward inputs, a loss scaler."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...trace.events import Autocast, Inexact, LossyCast, Scaler
from ..compat import tensors
from ..dispatcher import Call
from ..measures import class_name
from ..session import Session

# the dropouts of torch.nn.functional, with the name and the position of their rate
DROPOUTS = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), ("p", 1)
    ),
    "scaled_dot_product_attention": ("dropout_p", 4),
}
_LOW = (torch.bfloat16, torch.float16)
_LOOKS = 16  # forwards of one module whose inputs are looked at
_WHOLE = float(1 << 24)  # up to here float32 holds every whole number


def install(session: Session) -> None:
    """Subscribe to what is not exact in every run; to casts and scalers in runs of the script as it is."""
    found: set[str] = set()
    autocast: set[str] = set()
    plain = not (session.stand_in or session.request["full_precision"])

    def inexact(what: str) -> None:
        if what not in found:
            found.add(what)
            session.write(Inexact(what=what))

    def dropped(call: Call, key: str, position: int) -> None:
        if is_active(call, key, position):
            inexact("dropout")

    def constructed(call: Call) -> None:
        context = call.args[0]
        if tensors.autocast_is_on(context):
            inexact("autocast")
            if plain and not autocast:
                autocast.add("seen")
                session.write(Autocast(dtype=str(context.fast_dtype).removeprefix("torch.")))

    for name, (key, position) in DROPOUTS.items():
        session.dispatcher.around(
            f"torch.nn.functional:{name}", before=functools.partial(dropped, key=key, position=position)
        )
    session.dispatcher.around("torch:autocast.__init__", after=constructed)
    if plain:
        _watch_casts(session)
        _watch_scalers(session)


def is_active(call: Call, key: str, position: int) -> bool:
    """Whether a dropout, whose rate is the argument `key`, drops anything."""
    rate = call.given(position, key, 0.5 if key == "p" else 0.0)
    return bool(rate) and (key != "p" or bool(call.given(2, "training", True)))


def _watch_casts(session: Session) -> None:
    def sharded(call: Call) -> None:
        policy = call.kwargs.get("mp_policy")
        low = getattr(policy, "param_dtype", None)
        if low in _LOW and getattr(policy, "cast_forward_inputs", False):
            given = call.given(0, "module")
            for module in given if isinstance(given, list | tuple) else [given]:
                _watch(session, module, low)

    session.dispatcher.around("torch.distributed.fsdp:fully_shard", after=sharded)


def _watch(session: Session, module: nn.Module, low: torch.dtype) -> None:
    """Look at what `module` is given, before FSDP casts it."""
    looked = 0

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal looked
        if torch.compiler.is_compiling() or looked >= _LOOKS or session.in_backward:
            return
        looked += 1
        try:
            if _record_lost(session, module, tensors.tensors((args, kwargs)), low):
                looked = _LOOKS
        except Exception as error:
            session.report("precision.look", error)

    module.register_forward_pre_hook(look, prepend=True, with_kwargs=True)


def _record_lost(session: Session, module: nn.Module, given: list[torch.Tensor], low: torch.dtype) -> bool:
    for value in given:
        if (lost := lost_whole_numbers(value, low)) is not None:
            session.write(
                LossyCast(
                    cls=class_name(module).rpartition(".")[2].removeprefix("FSDP"),
                    shape=list(value.shape),
                    dtype=str(low).removeprefix("torch."),
                    changed=lost[0],
                    was=lost[1],
                    now=lost[2],
                    at_line=session.here(),
                )
            )
            return True
    return False


def lost_whole_numbers(value: torch.Tensor, low: torch.dtype) -> tuple[int, float, float] | None:
    """(elements changed by a cast to `low`, the first of them, what it becomes) of a tensor of counts, positions or times.

    Only tensors of whole numbers from 0 up are looked at: a mask of large negative numbers loses nothing that matters.
    """
    with torch.no_grad():
        part = tensors.local(value)
        wide = part.dtype in (torch.float32, torch.float64)
        if value.requires_grad or not wide or part.numel() == 0 or part.layout != torch.strided:
            return None
        whole = bool(((part >= 0) & (part <= _WHOLE) & (part == part.round())).all())
        if not whole:
            return None
        cast = part.to(low).to(part.dtype)
        wrong = cast != part
        number = int(wrong.sum())
        return (number, float(part[wrong][0]), float(cast[wrong][0])) if number else None


def _watch_scalers(session: Session) -> None:
    seen = False

    def scaled(call: Call) -> None:
        nonlocal seen
        scaler = call.args[0]
        if not seen and scaler.is_enabled():
            seen = True
            session.write(Scaler(cls=class_name(scaler)))

    session.dispatcher.around("torch.amp:GradScaler.scale", before=scaled)

"""Listening to what low precision does to inputs and to the loss: FSDP's cast of forward inputs, and a loss scaler."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

from . import torchlib
from .guard import guarded
from .measures import class_name
from .session import Session

_LOW = (torch.bfloat16, torch.float16)
_LOOKS = 16  # forwards of one module whose inputs are looked at
_WHOLE = float(1 << 24)  # up to here float32 holds every whole number


def install(session: Session) -> None:
    """Listen to casts only where they happen: in runs of the script as it is."""
    if session.stand_in or session.request["exact"]:
        return
    _listen_to_casts(session)
    _listen_to_scalers(session)
    _listen_to_autocast(session)


def _listen_to_casts(session: Session) -> None:
    real = fsdp.fully_shard

    @functools.wraps(real)
    def sharded(module: Any, **options: Any) -> Any:
        result = real(module, **options)
        policy = options.get("mp_policy")
        low = getattr(policy, "param_dtype", None)
        if low in _LOW and getattr(policy, "cast_forward_inputs", False):
            for item in module if isinstance(module, list | tuple) else [module]:
                _watch(session, item, low)
        return result

    torchlib.replace_everywhere(real, sharded)


def _watch(session: Session, module: nn.Module, low: torch.dtype) -> None:
    """Look at what `module` is given, before FSDP casts it."""
    looked = 0

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal looked
        if torch.compiler.is_compiling() or looked >= _LOOKS or session.in_backward:
            return
        looked += 1
        for value in torchlib.leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (lost := lost_whole_numbers(value, low)) is not None:
                looked = _LOOKS
                number, was, now = lost
                session.recorder.write(
                    "lossy_cast",
                    cls=class_name(module).rpartition(".")[2].removeprefix("FSDP"),
                    shape=list(value.shape),
                    dtype=str(low).removeprefix("torch."),
                    changed=number,
                    was=was,
                    now=now,
                    at_line=session.recorder.here(),
                )
                return

    module.register_forward_pre_hook(guarded(session.recorder, "cast", look), prepend=True, with_kwargs=True)


def lost_whole_numbers(value: torch.Tensor, low: torch.dtype) -> tuple[int, float, float] | None:
    """(elements changed by a cast to `low`, the first of them, what it becomes) of a tensor of counts, positions or times.

    Only tensors of whole numbers from 0 up are looked at: a mask of large negative numbers loses nothing that matters.
    """
    with torch.no_grad():
        part = torchlib.local(value)
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


def _listen_to_scalers(session: Session) -> None:
    scale = torch.amp.GradScaler.scale
    heard = False

    @functools.wraps(scale)
    def scaled(self: torch.amp.GradScaler, outputs: Any) -> Any:
        nonlocal heard
        if not heard and self.is_enabled():
            heard = True
            session.recorder.write("scaler", cls=class_name(self), at_line=session.recorder.here())
        return scale(self, outputs)

    torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign]


def _listen_to_autocast(session: Session) -> None:
    init = torch.autocast.__init__
    heard = False

    @functools.wraps(init)
    def constructed(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        nonlocal heard
        init(self, *args, **kwargs)
        if self._enabled and not heard:
            heard = True
            session.recorder.write("autocast", dtype=str(self.fast_dtype).removeprefix("torch."))

    torch.autocast.__init__ = constructed  # type: ignore[method-assign]

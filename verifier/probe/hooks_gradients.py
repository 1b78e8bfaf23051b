"""Listening to gradients in states that a script cannot see: partial numbers that are read, unsynced gradients that stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from . import torchlib
from .guard import guarded
from .session import Session

_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__complex__", "numpy", "__array__")


def install(session: Session) -> None:
    """There are no DTensor gradients and no unsynced ones in a stand-in."""
    if session.stand_in:
        return
    _listen_to_reads(session)
    _listen_to_zero_grad(session)
    _listen_to_clips(session)


def _listen_to_clips(session: Session) -> None:
    """A clip that is given no tensor at a line where it was given some before: a generator that is used up."""
    real = nn.utils.clip_grad_norm_
    filled: set[tuple[str, int]] = set()

    @functools.wraps(real)
    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if (place := session.recorder.here()) is not None:
            key = (place["file"], place["line"])
            if given:
                filled.add(key)
            elif key in filled:
                session.recorder.write("clip_of_nothing", step=session.step_number(), at_line=place)
        return real(given, *args, **kwargs)

    for place in (nn.utils, nn.utils.clip_grad):
        place.clip_grad_norm_ = clipped  # type: ignore[attr-defined]


def _listen_to_reads(session: Session) -> None:
    seen: set[tuple[str, int]] = set()

    def heard(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)

        @functools.wraps(real)
        def read(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return real(tensor, *args, **kwargs)
            if torchlib.partial_over(tensor) > 1 and (place := session.recorder.here()) is not None:
                key = (place["file"], place["line"])
                if key not in seen:
                    seen.add(key)
                    placements = [str(p) for p in tensor.placements]
                    session.recorder.write("partial_read", op=name, placements=placements, at_line=place)
            return real(tensor, *args, **kwargs)

        return read

    for name in _READS:
        setattr(DTensor, name, heard(name))


def _listen_to_zero_grad(session: Session) -> None:
    zero_optimizer, zero_module = Optimizer.zero_grad, nn.Module.zero_grad

    @functools.partial(guarded, session.recorder, "zero_grad")
    def left(params: set[int]) -> None:
        names = [slot.name for slot in session.all_slots() if slot.unsynced and id(slot.param) in params]
        if names:
            step = session.step_number()
            session.recorder.write("zeroed", step=step, unsynced=names, at_line=session.recorder.here())

    @functools.partial(guarded, session.recorder, "zero_grad")
    def cleared(module: nn.Module) -> None:
        slots = torchlib.slots(module)
        left({id(slot.param) for slot in slots})
        kept = [s.name for s in slots if s.param.grad is not None and torchlib.local(s.param.grad).count_nonzero()]
        if kept:
            session.recorder.write("not_cleared", names=kept, at_line=session.recorder.here())

    @functools.wraps(zero_optimizer)
    def of_optimizer(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        zero_optimizer(self, *args, **kwargs)
        if session.roots:
            left({id(p) for group in self.param_groups for p in group["params"]})

    @functools.wraps(zero_module)
    def of_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        zero_module(self, *args, **kwargs)
        if session.roots:
            cleared(self)

    Optimizer.zero_grad = of_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = of_module  # type: ignore[method-assign]
    if (reset := getattr(FSDPModule, "reset_iter_state", None)) is not None:

        @functools.wraps(reset)
        def discarded(module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
            session.recorder.write("discarded")
            return reset(module, *args, **kwargs)

        FSDPModule.reset_iter_state = discarded  # type: ignore[method-assign, assignment]

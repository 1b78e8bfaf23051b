"""Gradients in states that a script cannot see: partial numbers that are read, unsynced gradients that stay, shards in a step."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ...trace.events import ClipOfNothing, Clips, Discarded, NotCleared, PartialRead, ShardInStep, Zeroed
from ...trace.origin import within_torch
from ..compat.tensors import local, partial_over, slots
from ..dispatcher import Call
from ..frames import caller
from ..session import Session

_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__complex__", "numpy", "__array__")


def install(session: Session) -> None:
    """Subscribe; where DDP stands in there are no DTensor gradients and no unsynced ones."""
    if not session.stand_in:
        _watch_reads(session)
        _watch_zero_grad(session)
        _watch_clips(session)
        _watch_steps(session)


def _watch_clips(session: Session) -> None:
    """A clip that is given no tensor at a line where it was given some before: a generator that is used up."""
    filled: set[tuple[str, int]] = set()
    called = False

    def clipping(call: Call) -> None:
        nonlocal called
        if not called:
            called = True
            session.write(Clips())
        given = call.given(0, "parameters")
        if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
            return
        if not isinstance(given, list | tuple):  # what can be gone through only once is gone through here
            given = list(given)
            call.args, call.kwargs = (
                (given, *call.args[1:]),
                {k: v for k, v in call.kwargs.items() if k != "parameters"},
            )
        if (place := session.here()) is not None:
            key = (place.file, place.line)
            if given:
                filled.add(key)
            elif key in filled:
                session.write(ClipOfNothing(step=session.step_number(), at_line=place))

    session.dispatcher.around("torch.nn.utils:clip_grad_norm_", before=clipping)


def _watch_reads(session: Session) -> None:
    seen: set[tuple[str, int]] = set()

    def read(call: Call, name: str) -> None:
        tensor = call.args[0]
        if isinstance(tensor, DTensor) and partial_over(tensor) > 1 and (place := session.here()) is not None:
            key = (place.file, place.line)
            if key not in seen:
                seen.add(key)
                session.write(PartialRead(op=name, placements=[str(p) for p in tensor.placements], at_line=place))

    for name in _READS:
        session.dispatcher.around(f"torch.distributed.tensor:DTensor.{name}", before=functools.partial(read, name=name))


def _watch_zero_grad(session: Session) -> None:
    def left(params: set[int]) -> None:
        names = [slot.name for slot in session.all_slots() if slot.unsynced and id(slot.param) in params]
        if names:
            session.write(Zeroed(step=session.step_number(), unsynced=names, at_line=session.here()))

    def of_optimizer(call: Call) -> None:
        if session.roots:
            left({id(p) for group in call.args[0].param_groups for p in group["params"]})

    def of_module(call: Call) -> None:
        if session.roots:
            held = slots(call.args[0])
            left({id(slot.param) for slot in held})
            kept = [s.name for s in held if s.param.grad is not None and local(s.param.grad).count_nonzero()]
            if kept:
                session.write(NotCleared(names=kept, at_line=session.here()))

    def discarded(call: Call) -> None:
        session.write(Discarded())

    around = session.dispatcher.around
    around("torch.optim:Optimizer.zero_grad", after=of_optimizer)
    around("torch.nn:Module.zero_grad", after=of_module)
    around("torch.distributed.fsdp:FSDPModule.reset_iter_state", before=discarded, optional=True)


def _watch_steps(session: Session) -> None:
    """The first `to_local()` that an optimizer's own code asks for within its step."""
    seen = False

    def asked(call: Call) -> None:
        nonlocal seen
        if session.in_step and not seen and not within_torch(caller().f_code.co_filename):
            seen = True
            session.write(ShardInStep(at_line=session.here()))

    session.dispatcher.around("torch.distributed.tensor:DTensor.to_local", before=asked)

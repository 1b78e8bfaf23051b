"""Gradients in states that a script does not see: Partial values that are read, unsynced gradients,
shards in a step.
"""

import functools
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ...trace.events import (
    ClipOfNothing,
    Clips,
    Discarded,
    NotCleared,
    PartialRead,
    ShardInStep,
    Zeroed,
)
from ...trace.origin import within_torch
from ..compat.groups import slots
from ..compat.tensors import local, partial_over
from ..dispatcher import Call
from ..frames import caller
from ..session import Session

_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__complex__", "numpy", "__array__")
_DTENSOR = "torch.distributed.tensor:DTensor"


def install(session: Session) -> None:
    """Subscribe, except in a DDP run: it has no DTensor gradients and no unsynced ones."""
    if session.stand_in:
        return
    filled: set[tuple[str, int]] = set()  # lines that gave a clip tensors

    def clips(call: Call) -> None:
        if session.first("clip"):
            session.write(Clips(at_line=session.here()))

    def clipping(call: Call) -> None:
        given = call.given(0, "parameters")
        if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
            return
        once = not isinstance(given, list | tuple)
        if once:  # a generator, which only one iteration is possible over
            given = list(given)
            call.args = (given, *call.args[1:])
            call.kwargs = {k: v for k, v in call.kwargs.items() if k != "parameters"}
        if (place := session.here()) is not None:
            key = (place.file, place.line)
            if given:
                filled.add(key)
            # A clip of no parameters counts only at a line that has clipped some, or over a
            # generator that is used up (fault: a clip of an exhausted generator).
            elif key in filled or (
                once and any(slot.param.grad is not None for slot in session.all_slots())
            ):  # exhausted
                session.write(ClipOfNothing(step=session.step_number(), at_line=place))

    def read(call: Call, name: str) -> None:
        tensor = call.args[0]
        place = session.here() if isinstance(tensor, DTensor) and partial_over(tensor) > 1 else None
        # torch's `trunc_normal_` asks each rank's own shard whether it is in bounds: a partial
        # answer that is right (public trainers: trunc_normal_ on shards).
        if place is None or caller().f_code.co_filename.endswith("torch/nn/init.py"):
            return  # `trunc_normal_` draws until each rank's own shard is in bounds
        truth = bool(local(tensor)) if name == "__bool__" and tensor.numel() == 1 else None
        if session.first(("read", place.file, place.line, truth)):
            placements = [str(p) for p in tensor.placements]
            session.write(PartialRead(op=name, placements=placements, truth=truth, at_line=place))

    def left(params: set[int]) -> None:
        names = [
            slot.name for slot in session.all_slots() if slot.unsynced and id(slot.param) in params
        ]
        if names:
            session.write(
                Zeroed(step=session.step_number(), unsynced=names, at_line=session.here())
            )

    def zeroed_by_optimizer(call: Call) -> None:
        if session.roots:
            left({id(p) for group in call.args[0].param_groups for p in group["params"]})

    def zeroed_by_module(call: Call) -> None:
        if session.roots:
            held = slots(call.args[0])
            left({id(slot.param) for slot in held})
            kept = [
                s.name
                for s in held
                if s.param.grad is not None and local(s.param.grad).count_nonzero()
            ]
            if kept:
                session.write(NotCleared(names=kept, at_line=session.here()))

    def asked_for_shard(call: Call) -> None:
        by_optimizer = session.in_step and not within_torch(caller().f_code.co_filename)
        if by_optimizer and session.first("shard in step"):
            session.write(ShardInStep(at_line=session.here()))

    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
        session.around(f"torch.nn.utils:{name}", before=clips, optional=True)
    session.around("torch.nn.utils:clip_grad_norm_", before=clipping)
    for name in _READS:
        session.around(f"{_DTENSOR}.{name}", before=functools.partial(read, name=name))
    session.around("torch.optim:Optimizer.zero_grad", after=zeroed_by_optimizer)
    session.around("torch.nn:Module.zero_grad", after=zeroed_by_module)
    reset = "torch.distributed.fsdp:FSDPModule.reset_iter_state"
    session.around(reset, before=lambda call: session.write(Discarded()), optional=True)
    session.around(f"{_DTENSOR}.to_local", before=asked_for_shard)

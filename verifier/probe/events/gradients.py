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


class Watch:
    """Clips, reads of Partial values, and gradients that are cleared before they are reduced."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.filled: set[tuple[str, int]] = set()  # lines that gave a clip tensors

    def clips(self, call: Call) -> None:
        """A clip, or the norm of one, is about to be computed."""
        if self.session.first("clip"):
            self.session.write(Clips(at_line=self.session.here()))

    def clipping(self, call: Call) -> None:
        """A clip is about to be made of parameters, of which there may be none."""
        session = self.session
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
                self.filled.add(key)
            # A clip of no parameters counts only at a line that has clipped some, or over a
            # generator that is used up (fault: a clip of an exhausted generator).
            elif key in self.filled or (
                once and any(slot.param.grad is not None for slot in session.all_slots())
            ):
                session.write(ClipOfNothing(step=session.progress.step_number(), at_line=place))

    def read(self, call: Call, name: str) -> None:
        """A value of a DTensor is about to be read."""
        session, tensor = self.session, call.args[0]
        place = session.here() if isinstance(tensor, DTensor) and partial_over(tensor) > 1 else None
        # torch's `trunc_normal_` draws until each rank's own shard is in bounds: a partial answer
        # that is right (public trainers: trunc_normal_ on shards).
        if place is None or caller().f_code.co_filename.endswith("torch/nn/init.py"):
            return
        truth = bool(local(tensor)) if name == "__bool__" and tensor.numel() == 1 else None
        if session.first(("read", place.file, place.line, truth)):
            placements = [str(p) for p in tensor.placements]
            session.write(PartialRead(op=name, placements=placements, truth=truth, at_line=place))

    def _left(self, params: set[int]) -> None:
        """Record which of the parameters that were cleared had gradients to be reduced."""
        session = self.session
        names = [
            slot.name for slot in session.all_slots() if slot.unsynced and id(slot.param) in params
        ]
        if names:
            session.write(
                Zeroed(step=session.progress.step_number(), unsynced=names, at_line=session.here())
            )

    def zeroed_by_optimizer(self, call: Call) -> None:
        """An optimizer has cleared gradients."""
        if self.session.roots:
            self._left({id(p) for group in call.args[0].param_groups for p in group["params"]})

    def zeroed_by_module(self, call: Call) -> None:
        """A module has cleared gradients."""
        if not self.session.roots:
            return
        held = slots(call.args[0])
        self._left({id(slot.param) for slot in held})
        kept = [
            s.name for s in held if s.param.grad is not None and local(s.param.grad).count_nonzero()
        ]
        if kept:
            self.session.write(NotCleared(names=kept, at_line=self.session.here()))

    def asked_for_shard(self, call: Call) -> None:
        """The shard of a DTensor is asked for."""
        session = self.session
        by_optimizer = session.progress.in_step and not within_torch(caller().f_code.co_filename)
        if by_optimizer and session.first("shard in step"):
            session.write(ShardInStep(at_line=session.here()))


def install(session: Session) -> None:
    """Subscribe, except in a DDP run: it has no DTensor gradients and no unsynced ones."""
    if session.request.mode == "ddp":
        return
    watch = Watch(session)
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
        session.around(f"torch.nn.utils:{name}", before=watch.clips, optional=True)
    session.around("torch.nn.utils:clip_grad_norm_", before=watch.clipping)
    for name in _READS:
        session.around(f"{_DTENSOR}.{name}", before=functools.partial(watch.read, name=name))
    session.around("torch.optim:Optimizer.zero_grad", after=watch.zeroed_by_optimizer)
    session.around("torch.nn:Module.zero_grad", after=watch.zeroed_by_module)
    reset = "torch.distributed.fsdp:FSDPModule.reset_iter_state"
    session.around(reset, before=lambda call: session.write(Discarded()), optional=True)
    session.around(f"{_DTENSOR}.to_local", before=watch.asked_for_shard)

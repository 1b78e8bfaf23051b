"""Backwards: each one is a micro-batch, with its loss, its samples and its gradients."""

from collections.abc import Callable
from typing import Any

import torch

from ...trace.events import Micro
from ..compat.tensors import layout
from ..dispatcher import Call, Leave
from ..session import MicroBatch, Session
from .models import gradient_sketches

BACKWARD = "torch.autograd:backward"


class Backwards:
    """The backwards of a script; one within another, as activation checkpointing makes it, is a
    part of it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        # the step whose gradients the backward makes; an optimizer may step before it ends
        self.step = 1
        self.running: Call | None = None  # the outermost one

    def before(self, call: Call) -> Leave | None:
        """A backward is about to begin."""
        session = self.session
        if session.progress.in_backward:
            return None
        session.publish("before backward")
        session.progress.in_backward, self.step = True, session.progress.step_number()
        self.running = call
        return self._leave

    def _leave(self) -> None:
        self.session.progress.in_backward = False

    def after(self, call: Call) -> None:
        """A backward has ended."""
        session = self.session
        if self.running is call:
            self.running = None
            given = call.given(0, "tensors")
            with torch.no_grad():
                session.publish(
                    "backward", [given] if isinstance(given, torch.Tensor) else list(given)
                )

    def ended(self, tensors: list[torch.Tensor]) -> None:
        """Record the micro-batch that has ended."""
        session = self.session
        session.gradients.before_clip = {}
        slots = session.all_slots()
        if self.step > session.request.steps and session.request.stress:
            session.publish("beyond", slots)
            return
        session.progress.micro += 1
        session.gradients.last = gradient_sketches(slots)
        batch = session.batch
        session.write(
            Micro(
                step=self.step,
                loss=_loss(tensors),
                # A frozen or pretrained model may be trained in eval mode: its samples count if
                # there are no others (public trainers that train in eval mode).
                rows=batch.rows or batch.rows_in_eval,
                criteria=batch.criteria,
                random=batch.random_state,
                tokens=batch.tokens,
                parts=batch.parts,
                at_line=session.here(),
            )
        )
        session.batch = MicroBatch()

    def clipping(self, call: Call) -> None:
        """A clip is about to be made."""
        session = self.session
        # What the script does to its gradients before a clip is its own scale: compared with an
        # oracle is what it clips (exam r3 g_12_scale_after, round 6: gradients divided before the
        # clip).
        if not session.gradients.before_clip and session.roots and session.progress.micro:
            with torch.no_grad():
                session.gradients.before_clip = gradient_sketches(session.all_slots())
                session.gradients.last = session.gradients.last or session.gradients.before_clip

    def finalized(self, call: Call) -> None:
        """The gradients of a root are about to be reduced."""
        # those of the last backward are not reduced yet: what the clip or the step finds is
        self.session.gradients.last = {}


def install(session: Session) -> None:
    """Subscribe to `torch.autograd.backward` and to clips."""
    backwards = session.one(Backwards)
    session.around(BACKWARD, before=backwards.before, after=backwards.after)
    session.around(
        "torch.distributed.fsdp:FSDPModule.finalize_backward",
        before=backwards.finalized,
        optional=True,
    )
    session.subscribe("backward", backwards.ended)
    for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
        session.around(f"torch.nn.utils:{name}", before=backwards.clipping, optional=True)


def _loss(tensors: list[torch.Tensor]) -> float | None:
    """The loss that a backward began at, if it is one number that this rank knows."""
    # A loss may be a DTensor that every rank holds whole (tensor parallelism): its number is
    # known, a partial one is not.
    one_number = (
        len(tensors) == 1
        and tensors[0].numel() == 1
        and set(layout(tensors[0], 0).placements) <= {"R"}
    )
    return float(tensors[0].detach()) if one_number else None


def finish_each(session: Session, finish: Callable[[], None]) -> None:
    """Let a substitute finish the gradients of each backward, before any subscriber reads them."""

    backwards = session.one(Backwards)

    def replaced(call: Call, proceed: Callable[[], Any]) -> Any:
        result = proceed()
        if backwards.running is call:
            finish()
        return result

    session.around(BACKWARD, replace=replaced)

"""Huge gradients in the step after the last one, so that any clipping there is active."""

import torch

from ...trace.events import Stress
from ..compat.groups import Slot
from ..compat.tensors import local
from ..measures import products
from ..session import Session

# So much larger than any threshold of a clip that every clip is in force (only in the provoked run)
# (fault manual-local-norm-clip).
FACTOR = 1.0e6
# backwards without a step after the last step: the script skips steps with huge gradients The
# script may skip steps with huge gradients: after so many backwards the run is ended (a guard that
# skips steps with huge gradients).
_PATIENCE = 256


def install(session: Session) -> None:
    """Subscribe to backwards after the last step; there are none unless the request asks for
    stress.
    """
    amplified: dict[str, torch.Tensor] = {}  # as they were after the last backward

    def gradients(slots: list[Slot]) -> dict[str, torch.Tensor]:
        return {slot.name: local(slot.param.grad) for slot in slots if slot.param.grad is not None}

    def beyond() -> set[int]:
        """The parameters of the optimizers that have made all their steps."""
        past = [
            o for o in session.optimizers.alive() if session.optimizers.of(o).begun >= session.steps
        ]
        return {
            id(param)
            for optimizer in past
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def begins() -> None:
        """A backward begins: gradients that were cleared since the last one are no longer
        amplified.
        """
        for name, grad in gradients(session.all_slots()).items():
            if name in amplified and not bool(grad.count_nonzero()):
                del amplified[name]
        for name in amplified.keys() - gradients(session.all_slots()).keys():
            del amplified[name]

    def amplify(slots: list[Slot]) -> None:
        past = beyond()
        for name, grad in gradients([slot for slot in slots if id(slot.param) in past]).items():
            if name not in amplified:
                grad.mul_(FACTOR)
            amplified[name] = grad.clone()
        if not session.first("amplified", _PATIENCE):
            session.stop()

    def record() -> None:
        """The gradients at the step, or at the error that the script raises before it."""
        if amplified:
            now = gradients(session.all_slots())
            ratios = {
                name: products(before, now[name])
                for name, before in amplified.items()
                if name in now
            }
            session.write(Stress(products=ratios))

    if session.request["stress"]:
        session.subscribe("before backward", begins)
        session.subscribe("beyond", amplify)
        session.subscribe("stop", record)
        session.subscribe(
            "failed", record
        )  # such as a guard on the norm, which comes after the clip

"""Huge gradients in the step after the last one, so that any clipping there is active."""

import torch

from ...trace.events import Stress
from ..compat.groups import Slot
from ..compat.tensors import local
from ..measures import products
from ..session import Session

FACTOR = 1.0e6
_PATIENCE = 256  # backwards without a step after the last step: the script skips steps with huge gradients


def install(session: Session) -> None:
    """Subscribe to backwards after the last step; there are none unless the request asks for stress."""
    amplified: dict[str, torch.Tensor] = {}  # as they were after the last backward

    def gradients(slots: list[Slot]) -> dict[str, torch.Tensor]:
        return {slot.name: local(slot.param.grad) for slot in slots if slot.param.grad is not None}

    def amplify(slots: list[Slot]) -> None:
        grads = gradients(slots)
        if not amplified:
            for grad in grads.values():
                grad.mul_(FACTOR)
        amplified.clear()
        amplified.update({name: grad.clone() for name, grad in grads.items()})
        if not session.first("amplified", _PATIENCE):
            session.stop()

    def record() -> None:
        """The gradients at the step, or at the error that the script raises before it."""
        if amplified:
            now = gradients(session.all_slots())
            ratios = {name: products(before, now[name]) for name, before in amplified.items() if name in now}
            session.write(Stress(products=ratios))

    if session.request["stress"]:
        session.subscribe("beyond", amplify)
        session.subscribe("stop", record)
        session.subscribe("failed", record)  # such as a guard on the norm, which comes after the clip

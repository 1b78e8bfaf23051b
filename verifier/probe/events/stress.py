"""Huge gradients in the step after the last one, so that any clipping there comes into force and shows."""

from __future__ import annotations

import torch

from ...trace.events import Stress
from ..compat.tensors import Slot, local
from ..measures import products
from ..session import Session

FACTOR = 1.0e6
_PATIENCE = 256  # backwards without a step after the last step: the script skips steps with huge gradients


def install(session: Session) -> None:
    """Subscribe to backwards after the last step; there are none unless the request asks for stress."""
    if session.request["stress"]:
        stress = _Amplified(session)
        session.subscribe("beyond", stress.amplify)
        session.subscribe("stop", stress.record)
        session.subscribe("failed", stress.record)  # a guard on the norm, which comes after the clip


class _Amplified:
    """The gradients that were made huge, as they were after the last backward."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._grads: dict[str, torch.Tensor] | None = None
        self._backwards = 0

    def amplify(self, slots: list[Slot]) -> None:
        """A backward has ended after the last step."""
        grads = {slot.name: local(slot.param.grad) for slot in slots if slot.param.grad is not None}
        if self._grads is None:
            for grad in grads.values():
                grad.mul_(FACTOR)
        self._grads = {name: grad.clone() for name, grad in grads.items()} or None
        self._backwards += 1
        if self._backwards > _PATIENCE:
            self._session.stop()

    def record(self) -> None:
        """What became of them by the time of the step, or of the error that the script raises before it."""
        if self._grads is None:
            return
        now = {s.name: local(s.param.grad) for s in self._session.all_slots() if s.param.grad is not None}
        ratios = {name: products(before, now[name]) for name, before in self._grads.items() if name in now}
        self._session.write(Stress(products=ratios))

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
# The script may skip steps with huge gradients: after so many backwards without a step the run is
# ended (a guard that skips steps with huge gradients).
_PATIENCE = 256


class Amplifier:
    """The gradients that are amplified after the last step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.amplified: dict[str, torch.Tensor] = {}  # as they were after the last backward

    def begins(self) -> None:
        """A backward begins: gradients that were cleared since the last one are no longer
        amplified.
        """
        now = _gradients(self.session.all_slots())
        for name, grad in now.items():
            if name in self.amplified and not bool(grad.count_nonzero()):
                del self.amplified[name]
        for name in self.amplified.keys() - now.keys():
            del self.amplified[name]

    def amplify(self, slots: list[Slot]) -> None:
        """A backward after the last step has ended."""
        past = self._past()
        for name, grad in _gradients([slot for slot in slots if id(slot.param) in past]).items():
            if name not in self.amplified:
                grad.mul_(FACTOR)
            self.amplified[name] = grad.clone()
        if not self.session.first("amplified", _PATIENCE):
            self.session.stop()

    def record(self) -> None:
        """The gradients at the step, or at the error that the script raises before it."""
        if self.amplified:
            now = _gradients(self.session.all_slots())
            ratios = {
                name: products(before, now[name])
                for name, before in self.amplified.items()
                if name in now
            }
            self.session.write(Stress(products=ratios))

    def _past(self) -> set[int]:
        """The parameters of the optimizers that have made all their steps."""
        optimizers, steps = self.session.progress.optimizers, self.session.request.steps
        return {
            id(param)
            for optimizer in optimizers.alive()
            if optimizers.of(optimizer).begun >= steps
            for group in optimizer.param_groups
            for param in group["params"]
        }


def install(session: Session) -> None:
    """Subscribe to backwards after the last step; there are none unless the request asks for
    stress.
    """
    if not session.request.stress:
        return
    amplifier = Amplifier(session)
    session.subscribe("before backward", amplifier.begins)
    session.subscribe("beyond", amplifier.amplify)
    session.subscribe("stop", amplifier.record)
    # such as a guard on the norm, which comes after the clip
    session.subscribe("failed", amplifier.record)


def _gradients(slots: list[Slot]) -> dict[str, torch.Tensor]:
    return {slot.name: local(slot.param.grad) for slot in slots if slot.param.grad is not None}

"""Gradients that the loss of one optimizer leaves in the parameters of another, which uses them in
its next step.
"""

import torch
from torch.optim import Optimizer

from ...trace.events import Leftover, Place
from ..compat.tensors import local
from ..session import Session

_NAMES = 32


class Leftovers:
    """The gradients of one rank that were there when an optimizer stepped that does not hold their
    parameters.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left: dict[str, Place | None] = {}  # by parameter: where that optimizer stepped

    def before_backward(self) -> None:
        """A backward begins: what has been cleared is not left."""
        for slot in self.session.all_slots() if self.left else ():
            if slot.name in self.left and (
                # Gradients that were cleared before the next backward are left for nobody.
                slot.param.grad is None or not local(slot.param.grad).count_nonzero()
            ):
                del self.left[slot.name]

    def stepping(self, optimizer: Optimizer, closure: bool) -> None:
        """An optimizer is about to step.

        One that steps within a backward finds the gradients of others in any case.
        """
        session, turn = self.session, self.session.progress.optimizers.of(optimizer)
        # Optimizers that step within a backward find the gradients of others in any case; a closure
        # clears its own (zoo/step_in_backward; exam r3 g_16, i_17).
        if closure or session.progress.in_backward or len(session.progress.optimizers.alive()) < 2:
            return
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        here, used = session.here(), []
        for slot in (slot for slot in session.all_slots() if slot.param.grad is not None):
            if id(slot.param) not in held:
                self.left.setdefault(slot.name, here)
            elif slot.name in self.left:
                used.append((slot.name, self.left.pop(slot.name)))
        if used and turn.begun <= session.request.steps:
            names = [name for name, _ in used[:_NAMES]]
            session.write(
                Leftover(step=turn.begun, optimizer=turn.number, names=names, at_line=used[0][1])
            )


def install(session: Session) -> None:
    """Subscribe to backwards and steps."""
    leftovers = Leftovers(session)

    def before_backward() -> None:
        with torch.no_grad():
            leftovers.before_backward()

    session.subscribe("before backward", before_backward)
    session.subscribe("stepping", leftovers.stepping)

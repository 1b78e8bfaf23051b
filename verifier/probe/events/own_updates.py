"""Steps of a script that updates its weights itself, without an optimizer of torch.

Such a step is known when it is over: weights are others than before a backward when that ends (hooks update them), or others than
after it when the next forward with gradients begins, a state dict is taken, a checkpoint is written or read, or the script ends.
"""

from typing import Any

import torch

from ...launch.request import ONE_PROCESS
from ...trace.events import Step, Stepped
from ..compat.groups import Slot
from ..compat.tensors import local
from ..measures import products
from ..session import Session
from ..sketch import sketch

_STATE_DICTS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")


class OwnUpdates:
    """The updates of one rank. To the subscribers of a step it is an optimizer of all parameters, without state."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.param_groups: list[dict[str, Any]] = []
        self.before: dict[str, tuple[torch.Tensor, list[float]]] = {}  # weights before or after the last backward
        self.grads: dict[str, torch.Tensor] = {}
        self.sketches: dict[str, list[float] | None] = {}
        self.micros = 1  # backwards of the last step

    def before_backward(self) -> None:
        """A backward begins: hooks may update weights within it."""
        if not self.session.optimizers.of_torch and self.session.roots:
            self._keep()

    def after_backward(self, tensors: object) -> None:
        """A backward has ended: its gradients may be consumed from here on, if hooks have not done it."""
        session = self.session
        if session.optimizers.of_torch or not session.roots:
            return
        if session.step_number() > session.steps and session.micro >= self.micros:
            session.stop()  # here, where all ranks are: an update is seen where one rank saves, too
        self.grads, self.sketches = {}, session.grads
        with torch.no_grad():
            if changes := self._changes():
                self._record(changes)
                return
        slots = self._keep()
        self.grads = {s.name: local(s.param.grad).clone() for s in slots if s.param.grad is not None}

    def _keep(self) -> list[Slot]:
        slots = [slot for slot in self.session.all_slots() if slot.param.requires_grad]
        self.before = {s.name: (local(s.param).detach().clone(), sketch(s.param)) for s in slots}
        return slots

    def called(self, *call: object) -> None:
        """A model is called. Forwards without gradients may try weights that the update does not keep."""
        if torch.is_grad_enabled():
            self.look()

    def look(self) -> None:
        """Record the step that has been made since the last backward, if one has."""
        session = self.session
        if not self.before or session.optimizers.of_torch or session.in_backward:
            return
        with torch.no_grad():
            if changes := self._changes():
                self._record(changes)

    def _changes(self) -> dict[str, torch.Tensor]:
        """{parameter: its change since the weights were kept} if any has changed, else {}."""
        slots = [slot for slot in self.session.all_slots() if slot.name in self.before]
        changes = {s.name: local(s.param) - self.before[s.name][0] for s in slots}
        return changes if any(bool(change.count_nonzero()) for change in changes.values()) else {}

    def _record(self, changes: dict[str, torch.Tensor]) -> None:
        session = self.session
        slots = [slot for slot in session.all_slots() if slot.name in changes]
        turn = session.optimizers.at_step(self)
        turn.begun += 1
        self.micros, session.micro = session.micro, 0
        self.param_groups = [{"params": [s.param for s in slots]}]
        session.write(
            Step(
                step=turn.begun,
                optimizer=turn.number,
                cls="",
                lr=[],
                held=[s.name for s in slots],
                strangers=[],
                unsynced=[s.name for s in slots if s.unsynced],
                grads=self.sketches,
                after_backward={},
                rounded=[],
                grads_at_step=self.sketches,
                state={},
                weights={name: before for name, (_, before) in self.before.items()},
                at_line=session.here(),
            )
        )
        weights = {s.name: sketch(s.param) for s in session.all_slots()}
        moved = {name: self._moved(name, change) for name, change in changes.items()}
        session.write(Stepped(step=turn.begun, optimizer=turn.number, weights=weights, moved=moved))
        self.before = {}
        session.publish("updated", self)

    def _moved(self, name: str, change: torch.Tensor) -> list[float]:
        grad = self.grads.get(name, torch.zeros_like(change))
        along = products(change, grad)[1]
        return [float(change.to(torch.float64).square().sum()), along, float(change.count_nonzero())]


def install(session: Session) -> None:
    """Subscribe to backwards, and to all at which an update that came after one is seen."""
    if session.request["mode"] in ONE_PROCESS:
        return
    updates = OwnUpdates(session)
    session.subscribe("before backward", updates.before_backward)
    session.subscribe("backward", updates.after_backward)
    session.subscribe("call", updates.called, first=True)
    session.subscribe("checkpoint", updates.look)
    session.subscribe("ended", updates.look)
    for name in ("torch.nn:Module.state_dict", *(f"torch.distributed.checkpoint.state_dict:{n}" for n in _STATE_DICTS)):
        session.around(name, before=lambda call: updates.look())

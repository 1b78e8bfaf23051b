"""Steps of a script that updates its weights itself, without an optimizer of torch.

Such a step is known when it is over: weights are others than before a backward when that ends
(hooks update them), or others than after it when the next forward with gradients begins, a state
dict is taken, a checkpoint is written or read, or the script ends.

A request can ask for steps by samples: a step then ends at the first forward on other samples for
which weights are others. So it is in a training without backward (zeroth order, evolution
strategies), and where an update is tried on the same samples (line searches, products with the
Hessian): what lies between is a part of the step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...launch.request import ONE_PROCESS
from ...trace.events import Micro, Step, Stepped
from ..compat.groups import Slot
from ..compat.tensors import local
from ..measures import products
from ..session import Session
from ..tensor_fingerprint import row_hashes, sketch

BACKWARDS, FORWARDS = (
    "backwards",
    "forwards",
)  # steps by samples: of forwards with gradients, or of all
_STATE_DICTS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")


class OwnUpdates:
    """The updates of one rank.

    To the subscribers of a step it is an optimizer of all parameters, without state.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        asked = session.request.own_steps
        self.by: str = asked if asked in (BACKWARDS, FORWARDS) else ""
        self.batches: set[tuple[int, ...]] = set()  # the samples of each forward of the step
        self.param_groups: list[dict[str, Any]] = []
        # weights before or after the last backward
        self.before: dict[str, tuple[torch.Tensor, list[float]]] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.sketches: dict[str, list[float] | None] = {}
        self.micros = 1  # backwards of the last step
        if self.by == FORWARDS:
            session.progress.pending = lambda: bool(self._changes())

    def before_backward(self) -> None:
        """A backward begins: hooks may update weights within it."""
        if not self.session.progress.optimizers.of_torch and self.session.roots and not self.by:
            self._keep()

    def after_backward(self, tensors: object) -> None:
        """A backward has ended: its gradients may be consumed from here on, if hooks have not done
        it.
        """
        session = self.session
        if session.progress.optimizers.of_torch or not session.roots:
            return
        if self.by:
            with torch.no_grad():
                if (
                    # A gradient at weights that are only tried (zoo/conjugate_gradients, a line
                    # search) is not the one that the update is made of (zoo/conjugate_gradients;
                    # exam r2 f_16_line_search).
                    not self.sketches or not self._changes()
                ):  # those of a trial are not what the update is made of
                    self.grads, self.sketches = self._gradients(), session.gradients.last
            return
        if (
            session.progress.step_number() > session.request.steps
            and session.progress.micro >= self.micros
        ):
            session.stop()  # here, where all ranks are: an update is seen where one rank saves, too
        self.grads, self.sketches = {}, session.gradients.last
        with torch.no_grad():
            if changes := self._changes():
                self._record(changes)
                return
        self._keep()
        self.grads = self._gradients()

    def _slots(self) -> list[Slot]:
        return [
            slot
            for slot in self.session.all_slots()
            if slot.param.requires_grad or self.by == FORWARDS
        ]

    def _keep(self) -> None:
        self.before = {
            s.name: (local(s.param).detach().clone(), sketch(s.param)) for s in self._slots()
        }

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {
            s.name: local(s.param.grad).clone() for s in self._slots() if s.param.grad is not None
        }

    def called(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A model is called.

        A forward without gradients on samples of the step may try weights that the update does not
        keep.
        """
        session = self.session
        if (
            session.progress.optimizers.of_torch
            or session.progress.in_backward
            or all(module is not root for _, root in session.roots)
        ):
            return
        # A forward without gradients on the step's samples may try weights that the update does not
        # keep.
        tries = not torch.is_grad_enabled() and self.by != FORWARDS
        if tries and not self.before:
            return
        rows = row_hashes(given())
        if tries:
            if rows and tuple(rows) not in self.batches:
                self.look()
        elif self.by:
            self._given(rows)
        else:
            self.look()
            self.batches.add(tuple(rows))

    def _given(self, rows: list[int]) -> None:
        """The samples of a forward: with others than those of the step, it is over."""
        session = self.session
        # A step of a script without an optimizer ends where other samples come: it tries the same
        # ones several times (zeroth order: several forwards a step (zoo/zeroth_order)).
        if not rows or tuple(rows) not in self.batches:  # here come all ranks
            self.look()
            if session.progress.step_number() > session.request.steps:
                session.stop()
        self._batch(rows)

    def _batch(self, rows: list[int]) -> None:
        """Rows of the step. Those of forwards are its micro-batch, where no backward makes one."""
        known = tuple(rows) in self.batches
        self.batches.add(tuple(rows))
        # Two forwards of zeroth order on the same samples are one micro-batch of the step (zeroth
        # order (zoo/zeroth_order)).
        if self.by == FORWARDS and not known:
            session, line = self.session, self.session.here()
            session.progress.micro += 1
            session.write(
                Micro(
                    step=session.progress.step_number(),
                    loss=None,
                    rows=rows,
                    criteria=[],
                    random=None,
                    at_line=line,
                )
            )

    def begun(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A model is known by now, and has its starting point."""
        session = self.session
        if (
            self.by
            and not self.before
            and not session.progress.in_backward
            and not session.progress.optimizers.of_torch
        ):
            with torch.no_grad():
                if not self.batches:
                    self._batch(row_hashes(given()))
                self._keep()

    def noticed(self) -> None:
        """A checkpoint is written or read, or a state dict taken, perhaps on one rank alone."""
        if self.by != FORWARDS:
            self.look()

    def look(self) -> None:
        """Record the step that has been made since the last backward, if one has."""
        session = self.session
        if not self.before or session.progress.optimizers.of_torch or session.progress.in_backward:
            return
        with torch.no_grad():
            if changes := self._changes():
                self._record(changes)

    def _changes(self) -> dict[str, torch.Tensor]:
        """{parameter: its change since the weights were kept} if any has changed, else {}."""
        slots = [slot for slot in self.session.all_slots() if slot.name in self.before]
        changes = {s.name: local(s.param) - self.before[s.name][0] for s in slots}
        seen = any(bool(change.count_nonzero()) for change in changes.values()) or self._elsewhere(
            slots
        )
        return changes if seen else {}

    def _elsewhere(self, slots: list[Slot]) -> bool:
        """Whether gradients were consumed of which this rank has no elements: what was made of them
        is seen on other ranks alone.
        """
        cleared = all(slot.param.grad is None for slot in slots if slot.name in self.grads)
        return (
            # A rank without elements sees no change of its own: the gradients that were consumed
            # show that others made a step.
            bool(self.grads) and cleared and not any(grad.numel() for grad in self.grads.values())
        )

    def _record(self, changes: dict[str, torch.Tensor]) -> None:
        session = self.session
        slots = [slot for slot in session.all_slots() if slot.name in changes]
        turn = session.progress.optimizers.at_step(self)
        turn.begun += 1
        self.micros, session.progress.micro = session.progress.micro, 0
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
        self.before, self.batches = {}, set()
        if self.by:
            self.grads, self.sketches = {}, {}
        session.publish("updated", self)

    def _moved(self, name: str, change: torch.Tensor) -> list[float]:
        grad = self.grads.get(name, torch.zeros_like(change))
        along = products(change, grad)[1]
        return [
            float(change.to(torch.float64).square().sum()),
            along,
            float(change.count_nonzero()),
        ]


def install(session: Session) -> None:
    """Subscribe to backwards, and to all at which an update that came after one is seen."""
    if session.request.mode in ONE_PROCESS:
        return
    updates = OwnUpdates(session)
    session.subscribe("before backward", updates.before_backward)
    session.subscribe("backward", updates.after_backward)
    session.subscribe("call", updates.called, first=True)
    session.subscribe("call", updates.begun)
    session.subscribe("checkpoint", updates.noticed)
    session.subscribe("ended", updates.look)
    for name in (
        "torch.nn:Module.state_dict",
        *(f"torch.distributed.checkpoint.state_dict:{n}" for n in _STATE_DICTS),
    ):
        session.around(name, before=lambda call: updates.noticed())

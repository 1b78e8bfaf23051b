"""Optimizers: their construction, the state before and after each step.

The run ends at the step after the last requested one.
"""

import functools
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...trace.events import Optimizer as Constructed
from ...trace.events import Step, Stepped
from ..compat.groups import Slot
from ..compat.tensors import local, plain
from ..dispatcher import Call
from ..measures import class_name, movement, optimizer_state
from ..session import Session
from ..tensor_fingerprint import sketch
from ..unused_group_settings import install as watch_settings
from .models import Models, gradient_sketches


class Steps:
    """The steps of the optimizers of one rank."""

    def __init__(self, session: Session, models: Models) -> None:
        self.session = session
        self.models = models
        self.waiting: Optimizer | None = None  # its step has begun and is not recorded yet
        self.before: dict[str, torch.Tensor] = {}  # the weights before the step
        # parameters whose values after the last step no 16-bit dtype holds
        self.exact: set[str] | None = None

    def constructed(self, call: Call) -> None:
        """An optimizer was constructed."""
        session, optimizer = self.session, call.args[0]
        number, called = session.progress.optimizers.add(optimizer).number, bool(session.roots)
        session.write(
            Constructed(
                number=number,
                cls=class_name(optimizer),
                after_forward=called,
                at_line=session.here(),
            )
        )

    def stepping(self, optimizer: Optimizer, closure: bool) -> None:
        """An optimizer is about to step. Stops the run if it has made all its steps.

        With a closure, the gradients are known, and recorded, when the closure has ended.
        """
        session = self.session
        first = not session.progress.optimizers.of(optimizer).begun
        turn = session.progress.optimizers.at_step(
            optimizer, session.frames.lines(), trained=session.progress.micro > 0
        )
        if turn.begun >= session.request.steps and not closure:
            session.stop()
        turn.begun += 1
        session.progress.in_step = True
        session.progress.micro = 0
        self.waiting = optimizer
        if first and session.roots:
            self.models.adopt_the_rest()
        if not closure:
            self.record()

    def closed(self) -> None:
        """The closure of the current step has ended: it ran backward, and may have clipped."""
        if self.session.progress.step_number() > self.session.request.steps:
            self.session.stop()
        self.record()

    def record(self) -> None:
        """Record the state before the step."""
        session, optimizer, self.waiting = self.session, self.waiting, None
        if optimizer is None:
            return
        turn = session.progress.optimizers.of(optimizer)
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        slots = session.all_slots()
        names = {id(s.param): s.name for s in slots}
        names |= _shards_among(held.values(), slots, names)
        own = {names[key] for key in held if key in names}
        self.models.grow()
        fits = _in_16_bits(slots)
        at_step = gradient_sketches(slots)
        session.gradients.last = session.gradients.last or at_step
        session.write(
            Step(
                step=turn.begun,
                optimizer=turn.number,
                cls=class_name(optimizer),
                lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                held=[s.name for s in slots if s.name in own],
                strangers=[list(p.shape) for key, p in held.items() if key not in names],
                unsynced=[s.name for s in slots if s.unsynced],
                grads=session.gradients.before_clip or session.gradients.last,
                after_backward=session.gradients.last if session.gradients.before_clip else {},
                grads_at_step=at_step,
                state=optimizer_state(optimizer, names),
                weights={s.name: sketch(s.param) for s in slots},
                rounded=[name for name in fits if name in (self.exact or ())],
                halved=fits if self.exact is None else [],
                at_line=session.here(),
            )
        )
        self.before = {s.name: plain(local(s.param)).clone() for s in slots}

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self.record()
        session = self.session
        turn = session.progress.optimizers.of(optimizer)
        session.progress.in_step = False
        slots = session.all_slots()
        moved = {
            s.name: movement(s.param, self.before[s.name]) for s in slots if s.name in self.before
        }
        weights = {s.name: sketch(s.param) for s in slots}
        self.exact = {s.name for s in slots if s.param.dtype == torch.float32} - {
            *_in_16_bits(slots)
        }
        session.write(Stepped(step=turn.begun, optimizer=turn.number, weights=weights, moved=moved))


def _shards_among(
    held: Iterable[torch.Tensor], slots: list[Slot], names: dict[int, str]
) -> dict[int, str]:
    """{id of a plain tensor in the memory of a shard: the name of its parameter}: what an optimizer
    of local shards holds (nanotron's, as a script).
    """
    others = [one for one in held if id(one) not in names and type(one) is torch.Tensor]
    if not others:
        return {}
    shards = {(plain(local(s.param)).data_ptr(), local(s.param).numel()): s.name for s in slots}
    found = {id(one): shards.get((one.data_ptr(), one.numel())) for one in others if one.numel()}
    return {key: name for key, name in found.items() if name is not None}


def _in_16_bits(slots: list[Slot]) -> list[str]:
    """The float32 parameters whose shards a 16-bit type holds exactly."""
    return [s.name for s in slots if s.param.dtype == torch.float32 and _fits_16_bits(s.param)]


def _fits_16_bits(param: torch.Tensor) -> bool:
    """Whether bfloat16 or float16 holds every element of a shard exactly.

    Its first elements rule that out almost always.
    """
    flat = plain(local(param)).reshape(-1)
    return any(
        all(torch.equal(some, some.to(dtype).to(some.dtype)) for some in (flat[:64], flat))
        for dtype in (torch.bfloat16, torch.float16)
    )


def install(session: Session) -> None:
    """Subscribe to optimizers: their construction through the dispatcher, their steps through
    torch's own hooks.
    """
    steps = Steps(session, session.one(Models))
    making_state: set[int] = set()  # optimizers in a step that is none of the training

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", next(iter(args[1:]), None))
        if by_state_dict_helper() or (
            # Only a step that follows no backward, and has no closure, can be one that makes state
            # alone (exam round 4).
            closure is None and session.progress.micro == 0 and _makes_state(session, optimizer)
        ):
            making_state.add(id(optimizer))
            return None
        with torch.no_grad():
            session.publish("stepping", optimizer, callable(closure))
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def closed(*given: Any, **named: Any) -> Any:
            value = closure(*given, **named)
            with torch.no_grad():
                session.publish("closed")
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closed}
        return (args[0], closed, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in making_state:
            making_state.discard(id(optimizer))
            return
        with torch.no_grad():
            session.publish("stepped", optimizer)

    session.dispatcher.outermost(["torch.optim:Optimizer.__init__"], steps.constructed)
    session.subscribe("stepping", steps.stepping)
    session.subscribe("stepped", steps.stepped)
    session.subscribe("closed", steps.closed)
    watch_settings(session)
    register_optimizer_step_pre_hook(session.guarded(before))
    register_optimizer_step_post_hook(session.guarded(after))


def _makes_state(session: Session, optimizer: Optimizer) -> bool:
    """Whether a step that follows no backward only creates state, before a load: with learning
    rates of zero, or before any model is called with gradients of zero.
    """
    # A step with learning rate 0 only creates the optimizer's state before a load (exam round 4
    # k_15): no step of the training (exam r4 k_15_token_budget).
    if all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups):
        return True
    grads = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    return (
        # The same with gradients of zero, before any model is called: later, zeros may be a frozen
        # phase (state made by a step with zero gradients).
        not session.roots
        and bool(grads)
        and not any(bool(local(grad).count_nonzero()) for grad in grads)
    )


def by_state_dict_helper() -> bool:
    """Whether a state-dict helper of torch steps the optimizer, with zero gradients, to create its
    state.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(8):
        # torch's state-dict helper steps the optimizer with zero gradients to create its state:
        # torch's step, not the script's.
        if frame is None or frame.f_code.co_name == "_init_optim_state":
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_init_optim_state"

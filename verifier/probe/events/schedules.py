"""Schedules that are stepped, also while other optimizers step parameters of theirs."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...trace.events import Place, Scheduled
from ..dispatcher import Call, Dispatcher
from ..measures import class_name
from ..session import Session

_MODULE = "torch.optim.lr_scheduler"
# those of torch that do not call the step of the base
_OWN_STEP = ("ChainedScheduler", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau", "SequentialLR")


@dataclass
class Steps:
    """The steps of one optimizer."""

    made: int = 0
    lr: tuple[float, ...] = ()  # at the first
    moved: bool = False  # whether a later one had other learning rates, or it has a schedule


@dataclass
class Schedule:
    """One schedule, when it was stepped last."""

    optimizer: weakref.ref[Optimizer]
    made: int  # steps of its optimizer
    of_others: int  # steps of others that hold parameters of that one
    lr: tuple[float, ...]  # when it was stepped first since its optimizer stepped
    idle: int = 0  # times since then that it was stepped after a step of these others
    before: int = 0  # the most such times after which its optimizer stepped again
    seen: dict[str, Any] = field(default_factory=dict)


class Schedules:
    """The schedules and optimizers of one rank, none of which is kept alive."""

    def __init__(self, here: Callable[[], Place | None]) -> None:
        self.here = here
        self.steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
        self.known: weakref.WeakKeyDictionary[LRScheduler, Schedule] = weakref.WeakKeyDictionary()
        self.all: list[Schedule] = []

    def of(self, optimizer: Optimizer) -> Steps:
        """The steps of an optimizer."""
        return self.steps.setdefault(optimizer, Steps())

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        own, lr = self.of(optimizer), _lr(optimizer)
        own.made += 1
        if any(lr):  # a step without any only creates state
            own.moved |= own.lr not in ((), lr)
            own.lr = own.lr or lr
        for one in self.all:
            if one.optimizer() is optimizer:
                one.before, one.idle = max(one.before, one.idle), 0

    def scheduled(self, call: Call) -> None:
        """A schedule was stepped, by none that holds it."""
        scheduler = call.args[0]
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer):  # a project's class around one
            return
        own, lr, others = self.of(optimizer), _lr(optimizer), self._others(optimizer)
        own.moved = True
        of_others = sum(self.of(other).made for other in others)
        one = self.known.get(scheduler)
        if one is None or one.optimizer() is not optimizer:
            one = Schedule(weakref.ref(optimizer), own.made, of_others, lr)
            self.known[scheduler] = one
            self.all.append(one)
        one.idle += own.made == one.made and of_others > one.of_others
        if not one.idle:
            one.lr = lr
        one.made, one.of_others = own.made, of_others
        one.seen = {
            "cls": class_name(scheduler),
            "made": own.made,
            "moved": lr != one.lr,
            "lr": [*lr],
            "others": [class_name(other) for other in others],
            "lr_of_others": [value for other in others for value in _lr(other)],
            "others_moved": any(self.of(other).moved for other in others),
            "at_line": self.here(),
        }

    def records(self) -> list[Scheduled]:
        """What is known of each schedule by now."""
        return [Scheduled(idle=one.idle, before=one.before, **one.seen) for one in self.all]

    def watch(self, dispatcher: Dispatcher, guarded: Callable[..., Any]) -> None:
        """Subscribe to the steps of schedules and optimizers."""
        targets = [f"{_MODULE}:{name}.step" for name in ("LRScheduler", *_OWN_STEP)]
        dispatcher.outermost(targets, self.scheduled)
        register_optimizer_step_post_hook(guarded(self.stepped))

    def _others(self, optimizer: Optimizer) -> list[Optimizer]:
        """The other optimizers that have stepped and hold parameters of this one."""
        held = _held(optimizer)
        others = [one for one, steps in self.steps.items() if steps.made and one is not optimizer]
        return [one for one in others if held & _held(one)]


def install(session: Session) -> None:
    """Record them when the script has ended."""
    schedules = Schedules(session.here)

    def end() -> None:
        for record in schedules.records():
            session.write(record)

    schedules.watch(session.dispatcher, session.guarded)
    session.subscribe("ended", end)


def _lr(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def _held(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}

"""Schedules whose optimizer steps no more: what the probe records, what the rule makes of it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler

from records import Recorder, cases, ended, judge, run, steps
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.schedules import Schedules

RULE = "schedule-of-replaced-optimizer"
Parameters = list[torch.nn.Parameter]


class Training:
    """Steps of optimizers and schedules that a probe watches."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.probe = Schedules(self.recorder.here)
        self.trunk, self.head = ([torch.nn.Parameter(torch.ones(2))] for _ in "ab")

    def sgd(self, params: Iterable[torch.nn.Parameter] | None = None) -> torch.optim.SGD:
        return torch.optim.SGD(self.trunk + self.head if params is None else params, lr=0.1)

    def decay(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        made = LambdaLR(optimizer, lambda step: 0.9**step)
        self.probe.scheduled(Call((made,), {}))  # the constructor steps it, too
        return made

    def step(self, *of: torch.optim.Optimizer | LRScheduler) -> None:
        for one in of:
            one.step()
            if isinstance(one, LRScheduler):
                self.probe.scheduled(Call((one,), {}))
            else:
                self.probe.stepped(one, (), {})


def replaced(train: Training) -> None:
    old = train.sgd(train.head)
    schedule = train.decay(old)
    train.step(old, schedule)
    new = train.sgd()
    for _ in range(3):
        train.step(new, schedule)


def never_stepped(train: Training) -> None:
    schedule, new = train.decay(train.sgd()), train.sgd()
    for _ in range(3):
        train.step(new, schedule)


def two_schedules(train: Training) -> None:
    old, new = train.sgd(), train.sgd()
    first, second = train.decay(old), train.decay(new)
    train.step(old)
    for _ in range(4):
        train.step(new, first, second)


def own_parameters(train: Training) -> None:
    generator, critic = train.sgd(train.trunk), train.sgd(train.head)
    schedule = train.decay(generator)
    train.step(generator)
    for _ in range(4):
        train.step(critic, schedule)


def turns(train: Training) -> None:
    one, other = train.sgd(), train.sgd()
    schedule = train.decay(one)
    for optimizer in (one, other, other, one, other, other, other):
        train.step(optimizer, schedule)


def by_hand(train: Training) -> None:
    model, old = train.sgd(), train.sgd()
    schedule = train.decay(old)
    for _ in range(4):
        model.param_groups[0]["lr"] = schedule.get_last_lr()[0]
        train.step(model, schedule)


def wrapper(train: Training) -> None:
    inner, outer = train.sgd(), train.sgd()
    outer.param_groups = inner.param_groups
    schedule = train.decay(outer)
    for _ in range(4):
        train.step(inner, schedule)


def early(train: Training) -> None:
    optimizer = train.sgd()
    schedule = train.decay(optimizer)
    for _ in range(4):
        train.step(schedule, optimizer)


def warm(train: Training) -> None:
    old = train.sgd()
    schedule = LinearLR(old, total_iters=2)
    for _ in range(3):
        train.step(old, schedule)
    new = train.sgd()
    for _ in range(4):
        train.step(new, schedule)  # it has reached its end


def moved_to_the_new(train: Training) -> None:
    old, new = train.sgd(), train.sgd()
    schedule = train.decay(old)
    train.step(old, schedule)
    schedule.optimizer = new
    for _ in range(4):
        train.step(new, schedule)


# a schedule that is stepped before, or without, its optimizer
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@cases(
    "loop, status",
    (replaced, "fail"),
    (never_stepped, "fail"),
    (two_schedules, "pass"),
    (own_parameters, "pass"),
    (turns, "pass"),
    (by_hand, "pass"),
    (wrapper, "pass"),
    (early, "pass"),
    (warm, "pass"),
    (moved_to_the_new, "pass"),
)
def test_the_schedule_of_a_replaced_optimizer(
    loop: Callable[[Training], None], status: str
) -> None:
    train = Training()
    loop(train)
    for record in train.probe.records():
        train.recorder.write(record)
    made = run(*[[*steps(), *(_json(one) for one in train.recorder.events)]] * 2)
    assert judge(RULE, ended(made, "return")).status == status
    # a run that was stopped may have more steps of the old one
    warned = judge(RULE, ended(made, "stopped"))
    assert (warned.status, warned.required) == (status, status == "pass")


def test_without_a_schedule() -> None:
    assert judge(RULE, steps(), steps()).status == "not_applicable"


def _json(event: Any) -> dict[str, Any]:
    return {"kind": event.kind, **event.to_json()}

"""How steps are counted where optimizers come and go."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from records import cases
from verified_fsdp2.verifier.probe.events.manual_optimizer_steps import OwnUpdates
from verified_fsdp2.verifier.probe.events.optimizers import _makes_state
from verified_fsdp2.verifier.probe.optimizer_ids import Turns


def make(scheduled: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # makes a reference cycle
    return optimizer


def steps(
    turns: Turns, optimizer: torch.optim.Optimizer, count: int = 1, **how: Any
) -> tuple[int, int]:
    for _ in range(count):
        turn = turns.at_step(optimizer, **how)
        turn.begun += 1
    return turn.number, turn.begun


@pytest.mark.parametrize("scheduled", [False, True])
def test_one_that_takes_the_place_of_a_deleted_one_goes_on(scheduled: bool) -> None:
    turns, optimizer = Turns(), make(scheduled)
    assert steps(turns, optimizer, 3) == (0, 3)
    optimizer = make()
    assert turns.add(optimizer).late
    assert steps(turns, optimizer) == (0, 4) and turns.begun == 4


def test_pair_goes_on_in_its_order() -> None:
    turns, pair = Turns(), [make(), make()]
    assert [turns.add(optimizer).number for optimizer in pair] == [0, 1]
    assert [steps(turns, optimizer, 2) for optimizer in pair] == [(0, 2), (1, 2)]
    pair = [make(), make()]
    assert [steps(turns, optimizer) for optimizer in pair] == [(0, 3), (1, 3)]


def test_one_beside_another_counts_for_itself() -> None:
    turns, old, late = Turns(), make(), make()
    steps(turns, old, 3)
    turns.add(late)
    assert steps(turns, late) == (1, 1) and steps(turns, old) == (0, 4)
    assert turns.alive() == [old, late]


LOOP, OTHER = {"place": "line 9", "trained": True}, {"place": "line 12", "trained": True}


@pytest.mark.parametrize(
    ("first", "count", "second", "result"),
    [
        (LOOP, 3, LOOP, (0, 4)),  # the next phase of one loop
        (LOOP, 3, OTHER, (1, 1)),  # a partner that begins later
        (LOOP, 1, LOOP, (1, 1)),  # a partner in a loop over players
        (
            LOOP,
            3,
            {**LOOP, "trained": False},
            (1, 1),
        ),  # one for other parameters, after the same backward
    ],
)
def test_phases_of_one_loop(first: Any, count: int, second: Any, result: tuple[int, int]) -> None:
    turns, pair = Turns(), [make(), make()]
    assert [turns.add(optimizer).late for optimizer in pair] == [False, False]
    steps(turns, pair[0], count, **first)
    assert steps(turns, pair[1], **second) == result
    assert steps(turns, pair[0], **first) == (0, count + 1 + (result[0] == 0))


def test_a_resume_may_begin_with_the_last_step_of_a_phase() -> None:
    turns, pair = Turns(in_phases=True), [make(), make()]
    assert [steps(turns, optimizer, 1, **LOOP) for optimizer in pair] == [(0, 1), (0, 2)]


@cases(
    "rate, gradient, models, makes",
    (0.0, 1.0, 1, True),
    (0.1, 0.0, 0, True),
    (0.1, 0.0, 1, False),
    (0.1, 1.0, 0, False),
)
def test_a_step_that_only_makes_state(
    rate: float, gradient: float, models: int, makes: bool
) -> None:
    """Before a load: with a rate of zero, or with gradients of zero before any model is called."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), gradient)
    session: Any = SimpleNamespace(roots=[None] * models)
    assert _makes_state(session, torch.optim.SGD([param], lr=rate)) is makes


@cases("elements, cleared, seen", (0, True, True), (0, False, False), (2, True, False))
def test_an_update_of_parameters_of_which_a_rank_has_nothing(
    elements: int, cleared: bool, seen: bool
) -> None:
    """It is over when the gradients are cleared: on the other ranks the weights say it."""
    param = torch.nn.Parameter(torch.ones(elements))
    param.grad = None if cleared else torch.ones(elements)
    slot = SimpleNamespace(name="w", param=param)
    request = SimpleNamespace(own_steps="")
    session: Any = SimpleNamespace(request=request, all_slots=lambda: [slot])
    updates = OwnUpdates(session)
    updates.before, updates.grads = {"w": (param.detach().clone(), [])}, {"w": torch.ones(elements)}
    assert bool(updates._changes()) is seen

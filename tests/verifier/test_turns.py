"""How steps are counted where optimizers come and go."""

from typing import Any

import pytest
import torch

from verified_fsdp2.verifier.probe.turns import Turns


def make(scheduled: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # makes a reference cycle
    return optimizer


def steps(turns: Turns, optimizer: torch.optim.Optimizer, count: int = 1, **how: Any) -> tuple[int, int]:
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
        (LOOP, 3, {**LOOP, "trained": False}, (1, 1)),  # one for other parameters, after the same backward
    ],
)
def test_phases_of_one_loop(first: Any, count: int, second: Any, result: tuple[int, int]) -> None:
    turns, pair = Turns(), [make(), make()]
    assert [turns.add(optimizer).late for optimizer in pair] == [False, False]
    steps(turns, pair[0], count, **first)
    assert steps(turns, pair[1], **second) == result
    assert steps(turns, pair[0], **first) == (0, count + 1 + (result[0] == 0))

"""What must not be taken for a fault: a resume that comes to the same end, a run that was cut, an
optimizer whose time is over, chance.
"""

import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from records import cases, judge, micro, model, run, step, stepped
from verified_fsdp2.verifier.analysis.comparison import update_apart
from verified_fsdp2.verifier.analysis.ending import (
    changes_later,
    comes_to_the_same_end,
    resharded_to_the_same_end,
)
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.ending import Ending
from verified_fsdp2.verifier.probe.events.lora_merges import Exports
from verified_fsdp2.verifier.probe.events.survey import _digest, _named
from verified_fsdp2.verifier.tolerances import SAME_END
from verified_fsdp2.verifier.trace import Run

SAVE = {"kind": "checkpoint", "op": "save", "after_step": 2, "to": "/c"}
BEGIN = {
    "kind": "reached",
    "stack": [{"file": "train.py", "line": 1, "function": "main", "code": ""}],
}
LOAD = {"kind": "checkpoint", "op": "load", "after_step": 0, "to": "/c"}


def whole(steps: int, *weights: str, how: str = "return") -> Run:
    """A run of the whole script that made so many steps; a digest for each rank."""
    return run(
        *(
            [
                {**BEGIN, "steps": 0},
                {"kind": "reached", "steps": steps},
                {"kind": "reached", "steps": steps, "ended": True, "weights": one},
                {"kind": "end", "how": how},
            ]
            for one in weights
        ),
        role="survey",
    )


def ends(w: float, frozen: float = 0.0) -> list[dict[str, Any]]:
    """The records of one rank at the end of the script: a trained weight `w`, beside one that kept
    the value it had.
    """
    values = {"w": [w * w, w, 0.0, 0.0, 0.0], "base": [frozen**2, frozen, 0.0, 0.0, 0.0]}
    reached = {"kind": "reached", "steps": 9, "ended": True, "weights": "x", "still": ["base"]}
    return [{"kind": "final", "weights": values}, reached]


SURVEY = whole(9, "a", "b")
UNEVEN = replace(
    SURVEY, traces=(SURVEY.traces[0], whole(8, "a", "b").traces[1])
)  # the second rank skipped a step


@cases(
    "resumed_ending, steps",
    (whole(7, "a", "b"), 7),
    (whole(9, "a", "b"), 0),  # it began again
    (whole(7, "a", "c"), 0),
    (whole(7, "", ""), 0),
    (whole(7, "a", "b", how="exception"), 0),
    (None, 0),
)
def test_a_resume_that_comes_to_the_same_end(resumed_ending: Run | None, steps: int) -> None:
    assert comes_to_the_same_end(Evidence(survey=SURVEY, resumed_ending=resumed_ending)) == steps


@cases(
    "w, frozen, steps, same",
    (2.0 + 1e-6, 1.0, 5, True),
    (2.001, 1.0, 5, False),
    (2.001, 1e6, 5, False),  # what is never trained is no measure of what is
    (2.0, 1.0, 9, False),  # it began again
)
def test_resumes_on_other_ranks_that_come_to_the_same_end(
    w: float, frozen: float, steps: int, same: bool
) -> None:
    def whole_script(w: float, role: str, steps: int) -> Run:
        records = [
            model(),
            {**BEGIN, "steps": steps},
            ends(w, frozen)[0],
            {"kind": "end", "how": "return"},
        ]
        return run([*records, *(ends(w, frozen)[1:] if role == "survey" else ())], role=role)

    survey, end = whole_script(2.0, "survey", 9), whole_script(w, "resharded_ending", steps)
    known = Evidence(survey=survey, reshards=(run([model()], role="reshard"),))
    assert (resharded_to_the_same_end(replace(known, resharded_endings=(end,))) <= SAME_END) is same
    assert resharded_to_the_same_end(known) == math.inf


@cases("resumed_ending, status", (whole(7, "a", "b"), "pass"), (whole(7, "a", "c"), "fail"))
def test_a_resume_that_was_only_counted_otherwise(resumed_ending: Run, status: str) -> None:
    train = [
        one for k in range(1, 6) for one in (micro(k, float(k), rows=(k,)), step(k), stepped(k))
    ]
    resumed = run(*[[LOAD, micro(1, 9.0, rows=(3,)), step(1), stepped(1)]] * 2, role="resume")
    train[6:6] = [SAVE]
    found = judge(
        "resume-is-exact",
        train,
        train,
        resume=resumed,
        survey=SURVEY,
        resumed_ending=resumed_ending,
    )
    assert found.status == status, found.evidence


@cases(
    "survey, first, status",
    (SURVEY, "stopped", "inconclusive"),
    (UNEVEN, "stopped", "fail"),
    (SURVEY, "return", "fail"),
    (None, "stopped", "fail"),
)
def test_ranks_that_were_stopped_at_different_places(
    survey: Run | None, first: str, status: str
) -> None:
    error: dict[str, Any] = {
        "kind": "end",
        "how": "exception",
        "message": "Connection closed by peer",
        "frames": [],
    }
    made = [micro(1), step(1), stepped(1)]
    found = judge(
        "run-completes", [*made, {"kind": "end", "how": first}], [*made, error], survey=survey
    )
    assert found.status == status, found.evidence


def test_a_digest_of_weights_and_buffers() -> None:
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    digests = [
        _digest(tensor for _, tensor in _named([weakref.ref(module)])) for module in (one, other)
    ]
    assert digests[0] == digests[1] != _digest([]) == ""
    whole = nn.Sequential(one)
    assert {name for name, _ in _named([weakref.ref(one), weakref.ref(whole)])} >= {
        "0.weight",
        "0.running_mean",
    }
    one.weight.untyped_storage().resize_(
        0
    )  # as FSDP does with what it gathers: nothing may share the memory
    one = nn.BatchNorm1d(2)
    with torch.no_grad():
        other.running_mean.add_(1.0)  # type: ignore[union-attr]
    assert _digest(other.buffers()) != _digest(one.buffers())


@cases(
    "name, still, later",
    ("model1.mean", [], True),
    ("model1.mean", ["mean"], False),
    ("blocks.0.w", ["w"], True),
)
def test_what_changes_behind_the_compared_steps(name: str, still: list[str], later: bool) -> None:
    ended = {"kind": "reached", "steps": 9, "ended": True, "weights": "a", "still": still}
    survey = run(*[[ended, {"kind": "end", "how": "return"}]] * 2, role="survey")
    assert changes_later(Evidence(survey=survey), name) is later
    assert not changes_later(Evidence(), name)


@cases(
    "others, steps",
    ([[1], [1], [1]], 3),
    ([[1, 1], [1, 1], [1, 1]], 3),  # a critic steps twice
    (
        [[1], [1], [1, 1, 1]],
        2,
    ),  # the first optimizer steps no more: what follows belongs to none of its steps
    ([[], [], [1, 1]], 2),
    ([[], [], [1]], 3),
)
def test_steps_behind_the_last_one_of_the_first_optimizer(
    others: list[list[int]], steps: int
) -> None:
    records = []
    for k, own in enumerate(others, 1):
        records += [micro(k), step(k), stepped(k)]
        records += [one for _ in own for one in (step(k, optimizer=1), stepped(k, optimizer=1))]
    assert run(records, records).steps() == steps


@cases("bias, alike", (1e-9, True), (1e-2, False))
def test_updates_that_rounding_makes(bias: float, alike: bool) -> None:
    """Adam makes whole updates of a gradient that cancels: zero in one run, and what rounding
    leaves in the other.
    """

    def made(bias: float) -> Run:
        grads = {"w": [1.0, 1.0, 0.0, 0.0, 0.0], "b": [bias * bias, bias, 0.0, 0.0, 0.0]}
        before, after = (
            {"w": [1.0, x, 0.0, 0.0, 0.0], "b": [1.0, y, 0.0, 0.0, 0.0]}
            for x, y in ((1.0, 0.0), (2.0, bias > 0))
        )
        return run([model(), step(1, grads, weights=before), stepped(1, weights=after)])

    assert (update_apart(made(bias), made(0.0), 1)[0] < 1e-6) is alike


@cases("far, status", (1e-6, "pass"), (1e-2, "fail"), (None, "fail"))
def test_weights_at_the_end_of_one_process(far: float | None, status: str) -> None:
    """The first steps differ, and whole trainings do not: rounding, in a parameter that Adam moves
    by it.
    """

    def steps(update: float) -> list[dict[str, Any]]:
        before, after = ({"w": [1.0, x, 0.0, 0.0, 0.0]} for x in (1.0, 1.0 + update))
        loss = {"criteria": [], "rows": (1, 2)}
        return [
            model(),
            micro(1, 2.0, **loss),
            step(1, {"w": [1.0] * 5}, weights=before),
            stepped(1, weights=after),
        ]

    def whole_script(apart: float, role: str) -> Run:
        return run([model(), *ends(1.0 + apart), {"kind": "end", "how": "return"}], role=role)

    train, single = run(steps(0.1)), run(steps(0.11), role="single")
    ending = whole_script(far, "ending") if far is not None else None
    more = {
        "reference": run(steps(0.1), role="reference"),
        "perturbed": run(steps(0.1), role="perturbed"),
        "ending": ending,
    }
    found = judge(
        "matches-single-process",
        train,
        full_precision=train,
        single=single,
        survey=whole_script(0.0, "survey"),
        **more,
    )
    assert found.status == status, found.evidence


def test_adapters_that_are_in_the_weights_already() -> None:
    """An export that merges in place and gathers then: the module would add its adapters once
    more.
    """
    base, added = torch.ones(2, 2), torch.eye(2)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.a, self.b = (
                nn.Parameter(one.clone()) for one in (base, added, added)
            )
            self.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight + self.a @ self.b).T

    whole = nn.ModuleDict({"qkv": Adapted()})
    slots = [SimpleNamespace(param=param) for param in whole.parameters()]
    exports = Exports(SimpleNamespace(all_slots=lambda: slots))  # type: ignore[arg-type]
    exports.steps(torch.optim.SGD(whole.parameters()), (), {})
    for merges in (False, True):
        exports.known = {}
        if merges:
            with torch.no_grad():
                whole["qkv"].weight.add_(added)  # type: ignore[operator]
        call = Call((whole,), {})
        call.result = {name: value.detach() for name, value in whole.state_dict().items()}
        exports.gathered(call)
        assert bool(exports.known) is not merges


@cases("behind", "nothing", "a copy", "the best")
def test_weights_that_the_script_puts_in_place_behind_its_training(behind: str) -> None:
    """The best weights of an earlier step say nothing of the last one."""
    layer = nn.Linear(2, 2)
    written: list[Any] = []
    slots = [SimpleNamespace(name=name, param=param) for name, param in layer.named_parameters()]
    session: Any = SimpleNamespace(
        all_slots=lambda: slots, write=written.append, request=SimpleNamespace(reseed_after=0)
    )
    ending, optimizer = Ending(session), torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ending.stepped(optimizer)
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    if behind == "the best":
        layer.load_state_dict(kept)
    ending.destroys(Call((), {}))
    assert bool(written) is (behind != "the best")

"""Numbers that evaluations return: which calls are followed, and which numbers are held against one
process.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from records import cases, judge, micro, run, step, stepped
from verified_fsdp2.verifier.analysis.measured import measured, shown
from verified_fsdp2.verifier.analysis.state import handed_on
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.probe.events.measured import Measures
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.optimizer_ids import Turns
from verified_fsdp2.verifier.probe.session import StepProgress
from verified_fsdp2.verifier.trace.events import UNKNOWN, Measured

TEXT = """
def evaluate(model):
    for batch in batches:
        last = loss_of(batch)
    mean = total / number
"""
SOURCES = Sources({"train.py": TEXT}, ("train.py",))
RULE = "evaluation-same-in-one-process"


class Session:
    """As much of a session as the topic asks: one root, and a project that is this folder."""

    def __init__(self, root: nn.Module) -> None:
        self.roots, self.rank = [("", root)], 0
        self.request = SimpleNamespace(steps=5, mode="fsdp")
        self.progress = StepProgress(Turns())
        self.frames = Frames(str(Path(__file__).parent))
        self.written: list[Measured] = []

    def first(self, key: object, most: int) -> bool:
        return True

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook

    def write(self, event: Measured) -> None:
        self.written.append(event)


@pytest.fixture
def followed() -> Any:
    """(calls the model, begins a backward, what was written) in a project that is this folder;
    tests themselves train.
    """
    if sys.gettrace() is not None:
        pytest.skip("a tracer is there, and the topic leaves it alone")
    root = nn.Linear(1, 1)
    session = Session(root)
    measures = Measures(session)  # type: ignore[arg-type]
    measures.trains()
    yield SimpleNamespace(
        call=lambda: measures.called(root, None), train=measures.trains, written=session.written
    )
    assert sys.gettrace() is None


def small(followed: Any, value: Any) -> Any:
    with torch.no_grad():
        followed.call()
    return value


def hook(followed: Any) -> None:
    small(followed, {"loss": 0.5, "seen": 3, "name": "x"})


def without(followed: Any, given: float = 9.0) -> None:
    with torch.no_grad():
        followed.call()
    mean = torch.tensor(0.25)  # noqa: F841 what the function leaves


def both(followed: Any) -> float:
    inner = small(followed, 0.5)
    followed.train()
    return float(inner)


@cases(
    "call, values",
    (lambda f: small(f, 0.5), {"returned": 0.5}),
    (lambda f: small(f, (torch.tensor(0.5), torch.ones(2))), {"returned[0]": 0.5}),
    (hook, {"returned['loss']": 0.5}),  # of the inner call: the outer one returns nothing
    (without, {"mean": 0.25}),
    (both, {"returned": 0.5}),  # the outer one trains
)
def test_what_an_evaluation_makes(
    followed: Any, call: Callable[[Any], Any], values: dict[str, float]
) -> None:
    followed.train()
    call(followed)
    followed.train()
    assert [one.values for one in followed.written] == [values]


def test_draws_are_noted(followed: Any) -> None:
    def noisy() -> float:
        small(followed, None)
        return float(torch.rand(()))

    def shuffled() -> float:
        small(followed, None)
        return random.random()

    followed.train()
    for seed, function in (
        (1, noisy),
        (1, noisy),
        (2, noisy),
        (1, lambda: small(followed, 0.5)),
        (1, shuffled),
    ):
        torch.manual_seed(seed)
        function()
        followed.train()
    first, again, other, none, unseen = [one.drew for one in followed.written]
    assert first == again != other and first != "" == none and unseen == UNKNOWN


def call(value: float, path: str = "returned", **more: Any) -> dict[str, Any]:
    base = {"kind": "measured", "step": 2, "function": "evaluate", "drew": "", "caller": None}
    return {**base, "values": {path: value}, "at_line": None, **more}


def made(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    training = [one for k in range(1, 4) for one in (micro(k, rows=(k,)), step(k), stepped(k))]
    return [
        *training,
        {"kind": "state", "step": 2, "values": {}, "gone": [], "evaluations": 1, "in_eval": []},
        *calls,
    ]


@cases(
    "ranks, number",
    ([[call(0.5)], [call(0.5)]], 1),
    ([[call(0.5)], [call(0.4)]], 0),  # a rank's own part
    ([[call(3.0)], [call(3.0)]], 0),  # a count
    ([[call(0.5), call(0.4)]] * 2, 0),  # of each batch
    ([[call(0.5, drew=UNKNOWN)]] * 2, 0),
    ([[call(0.5, drew="a")], [call(0.5, drew="b")]], 0),  # a rank's own draws
    ([[call(0.5, drew="a")]] * 2, 1),
    ([[call(0.5, "last")]] * 2, 0),  # a loop assigns it
    ([[call(0.5, "mean")]] * 2, 1),
)
def test_numbers_of_all_ranks(ranks: list[list[dict[str, Any]]], number: int) -> None:
    assert len(measured(run(*(made(*calls) for calls in ranks)), SOURCES)) == number


@cases(
    "alone, drew, status",
    (0.5, "", "pass"),
    (0.4, "", "fail"),
    (0.25, "", "not_covered"),
    (1.0, "", "not_covered"),
    (0.4, "a", "not_covered"),  # from other noise
)
def test_what_is_returned_is_that_of_one_process(alone: float, drew: str, status: str) -> None:
    """Half and twice the value are sums of which the caller makes a mean."""
    ranks = run(*[made(call(0.5))] * 2)
    rows = [
        {**r, "rows": r["rows"] * 2} if r["kind"] == "micro" else r
        for r in made(call(alone, drew=drew))
    ]
    single = run([{"kind": "model", "starting_point": "loaded"}, *rows], role="single")
    found = judge(RULE, ranks, full_precision=ranks, single=single, sources=SOURCES)
    assert found.status == status, found.evidence


@cases(
    "text, path, is_shown",
    ("print(f'loss {mean:.3f}')", "mean", True),
    ("logger.info(f'loss {mean.item()}')", "mean", True),
    ("print(f'loss {float(mean)}')", "mean", True),
    ("print(f'loss {mean / world}')", "mean", False),  # another number is made of it
    ("print(f'loss {other}')", "mean", False),
    ("return mean", "returned", False),
    ("note(f'loss {mean}')", "mean", False),
)
def test_what_an_evaluation_prints_itself(text: str, path: str, is_shown: bool) -> None:
    sources = Sources({"train.py": f"def evaluate(model):\n    {text}\n"}, ("train.py",))
    assert shown(sources, "Trainer.evaluate", path) == is_shown


def test_half_of_one_process_is_no_sum_where_it_is_printed() -> None:
    sources = Sources({"train.py": "def evaluate(m):\n    print(f'{mean}')\n"}, ("train.py",))
    ranks = run(*[made(call(0.4, "mean"))] * 2)
    rows = [
        {**r, "rows": r["rows"] * 2} if r["kind"] == "micro" else r for r in made(call(0.8, "mean"))
    ]
    single = run([{"kind": "model", "starting_point": "loaded"}, *rows], role="single")
    found = judge(RULE, ranks, full_precision=ranks, single=single, sources=sources)
    assert found.status == "fail", found.evidence


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("main.m['loss']", True),
        ("main.m['norm']", False),
        ("main.total", True),
        ("main.seen", False),
    ],
)
def test_what_is_only_handed_on(path: str, expected: bool) -> None:
    """A rank's own part of a mean; what is printed as it is, is none."""
    source = """
def main():
    m, total, seen = update(), count(), look()
    line = [mean(m["loss"]), mean(total)]
    print(line, m["norm"], seen)
"""
    sources = Sources({"/p/train.py": source}, ("/p/train.py",))
    assert handed_on(sources, path) is expected

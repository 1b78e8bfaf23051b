"""How far a script is run, and what the report says was not judged."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import cases, ended, judge, run, step, stepped
from scripts import edited
from verified_fsdp2.verifier.analysis.not_covered import unreached
from verified_fsdp2.verifier.analysis.steps_to_compare import (
    steps_of,
    steps_to_compare,
    trains_before_sharding,
)
from verified_fsdp2.verifier.errors import PROBE_FAILED
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.source.unreached_blocks import blocks
from verified_fsdp2.verifier.trace import Ended

LOOP = """import torch

def helper(x):
    if x > 3:
        return x
    return x

def main():
    setup()
    for step in range(40):
        loss = helper(step)
        if step == 7:
            evaluate(loss)
        if step % 100 == 99:
            save(step)
        if bad(loss):
            raise ValueError(loss)
        if step % 10 == 0:
            print(step)
        optimizer.step()
    export(step)

main()
"""
STEP, EVALUATE, SAVE, EXPORT = 20, 13, 15, 21
FILE = "/p/train.py"
SOURCES = Sources({FILE: LOOP}, (FILE,))


def reached(steps: int, *lines: int, backwards: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "kind": "reached",
        "steps": steps,
        "lines": {FILE: list(lines)},
        "backwards": backwards,
        **more,
    }


def survey(*events: dict[str, Any], total: int = 40) -> Any:
    place = {"file": FILE, "line": STEP, "function": "main", "code": ""}
    stack = [place, {**place, "line": 24, "function": "<module>"}]
    begin = reached(0, 1, 3, 8, 24, *(9, 10, 11, 4, 6, 12, 14, 16, 18), stack=stack, sharded=True)
    steps = [
        reached(k, *((4, 6, 10, 11, 12, 14, 16, 18, 20) if k == 1 else ()))
        for k in range(1, total + 1)
    ]
    found = {event["steps"]: event for event in events}
    return run([begin, *(found.get(event["steps"], event) for event in steps)], role="survey")


def test_what_belongs_to_the_training() -> None:
    lines = {1, 3, 8, 24, 9, 10, 11, 4, 6, 12, 14, 16, 18, 20}
    found = {(block.first, there) for block, there in blocks(ast.parse(LOOP), lines)}
    assert {
        (EVALUATE, False),
        (SAVE, False),
        (EXPORT, False),
    } <= found, "branches, and what comes behind the loop"
    missing = {first for first, there in found if not there}
    assert not missing & {5, 9, 17, 19}, "not what leaves, raises, prints or comes before"


@cases(
    "event, steps",
    (None, 5),
    (reached(9, EVALUATE), 10),  # first reached after step 8: two more
    (reached(31, EVALUATE), 5),  # too late to be compared
    (reached(8, backwards=2), 10),  # step 8 has another number of backwards, and step 9 again
    (reached(8, trainable=3), 10),
)
def test_how_many_steps_are_compared(event: dict[str, Any] | None, steps: int) -> None:
    assert steps_to_compare(survey(*([event] if event else [])), SOURCES, False) == steps


def test_a_save_is_followed_by_three_steps() -> None:
    records = [
        r.to_json() | {"kind": r.kind} for r in survey().traces[0].records if r.kind != "end"
    ]
    saved = run([*records, {"kind": "checkpoint", "op": "save", "after_step": 4, "to": "/c/4"}])
    assert (steps_to_compare(saved, SOURCES, True), steps_to_compare(saved, SOURCES, False)) == (
        7,
        5,
    )


@cases("after, steps", (30, 33), (38, 40), (61, 5))
def test_the_first_save_is_waited_for(after: int, steps: int) -> None:
    records = [
        r.to_json() | {"kind": r.kind} for r in survey().traces[0].records if r.kind != "end"
    ]
    saved = run([*records, {"kind": "checkpoint", "op": "save", "after_step": after, "to": "/c/4"}])
    assert steps_to_compare(saved, SOURCES, True) == steps


@cases("op, steps", ("async_save", 15), ("save", 7))
def test_the_mark_of_a_save_in_the_background_is_waited_for(op: str, steps: int) -> None:
    """A file of the script's own that is written later says which save is complete."""
    records = [
        r.to_json() | {"kind": r.kind} for r in survey().traces[0].records if r.kind != "end"
    ]
    made = [(op, 4, "/c/4"), ("write", 12, "/c/LATEST")]
    saved = run(
        [
            *records,
            *({"kind": "checkpoint", "op": o, "after_step": k, "to": to} for o, k, to in made),
        ]
    )
    assert steps_to_compare(saved, SOURCES, True) == steps


@cases("each, steps", (0.2, 32), (0.3, 5))
def test_more_steps_are_compared_where_they_are_fast(each: float, steps: int) -> None:
    records = survey(reached(31, EVALUATE)).traces[0].records
    timed = [
        r.to_json() | {"kind": r.kind, "at": each * k}
        for k, r in enumerate(records)
        if r.kind != "end"
    ]
    assert steps_to_compare(run(timed), SOURCES, False) == steps


def test_a_short_script() -> None:
    assert steps_of(survey(total=6)) == 6
    assert steps_to_compare(survey(reached(6, EVALUATE), total=6), SOURCES, False) == 6


def test_what_was_not_judged() -> None:
    train = run([stepped(k, weights={}, moved={}) for k in range(1, 6)])
    evidence = Evidence(train=train, survey=survey(reached(31, EVALUATE)), sources=SOURCES)
    found = {(one.block.first, one.step) for one in unreached(evidence)}
    assert {(SAVE, None), (EXPORT, None), (EVALUATE, 30)} <= found
    assert unreached(Evidence(train=train, sources=SOURCES)) == []


def test_another_model_that_is_trained_first() -> None:
    place = {"file": FILE, "line": STEP, "function": "main", "code": ""}
    teacher = [reached(0, 1, stack=[place]), *(reached(k) for k in range(1, 9))]
    student = [reached(0, 2, stack=[place], sharded=True), *(reached(k) for k in range(1, 4))]
    assert trains_before_sharding(run([*teacher, *student])) and not trains_before_sharding(
        run(student)
    )
    assert steps_of(run([*teacher, *student])) == 3
    for apart in (
        True,
        False,
    ):  # another model that is trained after `fully_shard`, and before the sharded one
        assert (
            trains_before_sharding(run([*student, {**reached(3), "ended": True, "apart": apart}]))
            is apart
        )


@cases(
    "saves, resumed",
    ([("save", 2), ("save", 4), ("save", 5)], 2),  # the last one with three steps after it
    ([("save", 3), ("save", 4), ("save", 5)], 4),  # none has: the last one before the last step
    ([("torch.save", 3)], 3),
    ([("save", 3), ("torch.save", 4)], 3),  # an export is no checkpoint beside dcp
    ([("save", 5)], None),
)
def test_the_save_that_is_resumed(saves: list[tuple[str, int]], resumed: int | None) -> None:
    rows = [record for number in range(1, 6) for record in (step(number), stepped(number))]
    rows += [{"kind": "checkpoint", "op": op, "after_step": after} for op, after in saves]
    assert Evidence(train=run(rows)).saved_after() == resumed
    assert Evidence(train=None).saved_after() is None


@cases(
    "last, epochs, resumed", (12, (), 9), (12, (10,), 6), (9, (), 9)
)  # 12: a later save hides it
def test_a_resume_that_is_repeated_begins_in_the_middle(
    last: int, epochs: tuple[int, ...], resumed: int
) -> None:
    rows = [record for number in range(1, 13) for record in (step(number), stepped(number))]
    rows += [
        {"kind": "checkpoint", "op": "save", "after_step": after} for after in range(3, last + 1, 3)
    ]
    rows += [{"kind": "loader_started", "samples": 8, "step": number} for number in epochs]
    assert Evidence(train=run(rows)).saved_after() == resumed


@cases(
    "cls, begins, after", ("", 3.0, 3), ("", 2.0, 2), ("", 7.0, 2), ("torch.optim.sgd.SGD", 3.0, 2)
)
def test_an_update_before_the_first_backward_of_a_resume(
    cls: str, begins: float, after: int
) -> None:
    """Before step k of the train run the weight has the value k - 1; it saves after step 2."""
    rows = [
        one
        for k in range(1, 6)
        for one in (step(k, cls=cls, weights={"w": [k - 1.0] * 5}), stepped(k))
    ]
    rows += [{"kind": "checkpoint", "op": "save", "after_step": 2}]
    resume = run([step(1, cls=cls, weights={"w": [begins] * 5}), stepped(1)], role="resume")
    assert Evidence(train=run(rows), resume=resume).resumed_after() == after


TEACHER = """
teacher = torch.nn.Linear(4, 4)
first = torch.optim.SGD(teacher.parameters(), lr=0.1)
for _ in range(9):
    first.zero_grad()
    teacher(torch.ones(2, 4)).square().mean().backward()
    first.step()
"""


def test_a_script_as_its_author_wrote_it(verify_script: Any, tmp_path: Path) -> None:
    script = edited(
        tmp_path,
        ("    model = build()\n", TEACHER.replace("\n", "\n    ") + "\n    model = build()\n"),
        ("EVAL_EVERY = 16, 128, 16, 2", "EVAL_EVERY = 16, 128, 16, 7"),
        (
            "    set_model_state_dict(model, best)\n",
            "    if STEPS > 99:\n        torch.save(best, 'best.pt')\n",
        ),
        of="best_weights",
    )
    only = ("same-data-on-every-rank", "run-completes")
    verdict = verify_script(script, only=only, steps="auto")
    assert {f.rule: f.status for f in verdict.findings} == dict.fromkeys(only, "pass")
    horizon = verdict.facts["horizon"]
    assert (horizon["steps"], horizon["ended"]) == (16, True)
    assert verdict.target["steps"] == 9, "two steps after the evaluation"
    assert [one["code"] for one in horizon["lines"]] == ["if STEPS > 99:"]


@cases("code, status", (1, "fail"), (PROBE_FAILED, "pass"))
def test_an_error_of_the_probe_in_the_survey_is_not_the_scripts(code: int, status: str) -> None:
    train = run([one for k in (1, 2) for one in (step(k), stepped(k))])
    error = {"kind": "probe_error", "symbol": "survey", "text": "KeyError: x", "where": ""}
    made = ended(run([error] * (code == PROBE_FAILED), role="survey"))
    for trace in made.traces:
        object.__setattr__(
            trace, "records", trace.records[: -1 if code == PROBE_FAILED else None]
        )  # it has no end
    made = replace(made, ended=(Ended(0, code, False),))
    assert judge("run-completes", train, survey=made).status == status

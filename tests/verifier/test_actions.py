"""`next` and `not_covered` of the JSON report."""

from dataclasses import replace
from typing import Any

from records import cases
from verdicts import verdict
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report.actions import next_steps, not_covered
from verified_fsdp2.verifier.trace.events import Place

LINE = Place(file="train.py", line=7, function="main", code="x")
WRONG = Finding("optim-before-shard", "fail", "built before", location=LINE, fix="Build it after.")
FOLLOWS = replace(WRONG, rule="matches-ddp", consequence=True)
FAULT = Finding("root-not-wrapped", "error", "KeyError")
UNKNOWN = Finding("matches-ddp", "fail", "apart", fix="Compare.")
OPEN = Finding("resume-is-exact", "inconclusive", "no save was seen")
RERUN = ("run", "fsdp2 verify train.py")


@cases(
    "findings, expected",
    ((), []),
    ((FOLLOWS, WRONG), [("edit", "Build it after."), RERUN]),
    ((UNKNOWN,), [("find", "apart. Compare."), RERUN]),
    ((FAULT,), [("report a fault of fsdp2", "KeyError"), RERUN]),
    ((replace(WRONG, required=False),), []),  # a warning
    (
        (OPEN, replace(OPEN, rule="load-without-set")),
        [("report as not checked", "no save was seen")],
    ),
)
def test_what_to_do_next(findings: tuple[Finding, ...], expected: list[tuple[str, str]]) -> None:
    assert [(step["do"], step["text"]) for step in next_steps(verdict(*findings))] == expected


def test_what_names_a_line_and_the_suggested_command() -> None:
    found = next_steps(replace(verdict(WRONG, OPEN), suggestion="fsdp2 verify --save-args x"))
    assert [step["do"] for step in found] == ["edit", "run", "run", "report as not checked"]
    assert found[0]["at"] == "train.py:7 in main"


@cases(
    "changes, expected",
    ({}, "one rank|other arguments|CPU"),
    ({"reshard_to": [4]}, "other world sizes than 1, 2 and 4"),
    ({"devices": 2}, ""),
)
def test_what_a_pass_has_not_looked_at(changes: dict[str, Any], expected: str) -> None:
    devices = changes.pop("devices", 0)
    made = verdict(**changes)
    text = " ".join(
        not_covered(replace(made, environment={**made.environment, "devices": devices}))
    )
    assert all(part in text or part == "one rank" for part in expected.split("|"))
    assert ("NCCL" in text) == (not devices)
    simulated = {"role": "simulate"}
    assert not_covered(replace(made, runs=[simulated])) == []


def test_lines_that_no_run_reached_come_first() -> None:
    line = {"file": "/a/train.py", "first": 8, "last": 9, "code": "save()", "after_step": None}
    facts = {"horizon": {"steps": 9, "ended": True, "seconds": 3.0, "lines": [line]}}
    assert not_covered(replace(verdict(), facts=facts))[0].startswith("save() (")

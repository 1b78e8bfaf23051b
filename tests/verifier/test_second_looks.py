"""What the whole script shows against a failure of its first steps: a resume that comes to the same end, a run that was cut."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from records import cases, judge, micro, run, step, stepped
from verified_fsdp2.verifier.analysis.ending import comes_to_the_same_end
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.probe.events.survey import _digest
from verified_fsdp2.verifier.trace import Run

SAVE = {"kind": "checkpoint", "op": "save", "after_step": 2, "to": "/c"}
LOAD = {"kind": "checkpoint", "op": "load", "after_step": 0, "to": "/c"}


def whole(steps: int, *weights: str, how: str = "return") -> Run:
    """A run of the whole script that made so many steps; a digest for each rank."""
    begin = {"kind": "reached", "steps": 0, "stack": [{"file": "train.py", "line": 1, "function": "main", "code": ""}]}
    return run(
        *(
            [
                begin,
                {"kind": "reached", "steps": steps},
                {"kind": "reached", "steps": steps, "ended": True, "weights": one},
                {"kind": "end", "how": how},
            ]
            for one in weights
        ),
        role="survey",
    )


SURVEY = whole(9, "a", "b")


@cases(
    "continued, steps",
    (whole(7, "a", "b"), 7),
    (whole(9, "a", "b"), 0),  # it began again
    (whole(7, "a", "c"), 0),
    (whole(7, "", ""), 0),
    (whole(7, "a", "b", how="exception"), 0),
    (None, 0),
)
def test_a_resume_that_comes_to_the_same_end(continued: Run | None, steps: int) -> None:
    assert comes_to_the_same_end(Evidence(survey=SURVEY, continued=continued)) == steps


@cases("continued, status", (whole(7, "a", "b"), "pass"), (whole(7, "a", "c"), "fail"))
def test_a_resume_that_was_only_counted_otherwise(continued: Run, status: str) -> None:
    train = [one for k in range(1, 6) for one in (micro(k, float(k), rows=(k,)), step(k), stepped(k))]
    resumed = run(*[[LOAD, micro(1, 9.0, rows=(3,)), step(1), stepped(1)]] * 2, role="resume")
    train[6:6] = [SAVE]
    found = judge("resume-is-exact", train, train, resume=resumed, survey=SURVEY, continued=continued)
    assert found.status == status, found.evidence


@cases(
    "survey, first, status", (SURVEY, "stopped", "inconclusive"), (SURVEY, "return", "fail"), (None, "stopped", "fail")
)
def test_ranks_that_were_stopped_at_different_places(survey: Run | None, first: str, status: str) -> None:
    error: dict[str, Any] = {"kind": "end", "how": "exception", "message": "Connection closed by peer", "frames": []}
    made = [micro(1), step(1), stepped(1)]
    found = judge("run-completes", [*made, {"kind": "end", "how": first}], [*made, error], survey=survey)
    assert found.status == status, found.evidence


def test_a_digest_of_weights_and_buffers() -> None:
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert _digest([one, one]) == _digest([other])
    assert _digest([]) == _digest([SimpleNamespace(parameters=list, buffers=list)]) == ""  # type: ignore[list-item]
    with torch.no_grad():
        other.running_mean.add_(1.0)  # type: ignore[union-attr]
    assert _digest([one]) != _digest([other])

"""The last, shorter accumulation window of an epoch, in the survey run."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from records import LINE, cases, judge, judged_as, micro, model, row, run, step, stepped
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.accumulation import _scale as scale_of
from verified_fsdp2.verifier.probe.substitutes.cuda_on_cpu.placement import Placement

RULE = "gradient-of-mean-loss"
TRAIN = [model(), micro(), step(), stepped()]
Records = list[dict[str, Any]]


def window(batches: int, scale: float | None, changed: float | None = 1.0) -> Records:
    """The backwards of a step, and the step."""
    fields = {"batches": batches, "scale": scale, "changed": changed, "at_line": LINE}
    batch = {"kind": "batch", "step": 1, "rows": [1], "size": 1}
    return [*[batch] * batches, {"kind": "accumulation", **fields}]


LOADER = [{"kind": "loader_started", "samples": 9, "step": 1, "at_line": LINE}]
DIVIDE = [{"kind": "divide", "factor": 1.0, "at_line": LINE}]
FIRST, FULL = window(4, 0.25, None), window(4, 0.25)


def survey(*parts: Records) -> dict[str, Any]:
    """Evidence of a survey run that begins with two full windows."""
    records = [one for part in (LOADER, FIRST, FULL, *parts) for one in part]
    return {"survey": run(records, role="survey")}


NAMED = ("1 micro-batch and divides each loss by 4", "0.25 times")

test_the_survey = judged_as(
    row(RULE, "fail", TRAIN, at=LINE, names=NAMED, **survey(window(1, 0.25), LOADER, FULL)),
    row(RULE, "fail", TRAIN, at=LINE, **survey(window(2, 0.25))),  # the last step of all
)


@cases(
    "parts, words",
    ([window(1, 0.25, None), FULL, FULL], "the first step has 1 micro-batch and divides"),
    ([window(1, 1.0, None), FULL, FULL], ""),  # divided by what it has
    ([window(1, 0.25, None), window(2, 0.25), FULL, FULL], ""),  # an accumulation that grows
)
def test_the_first_step_of_all(parts: list[Records], words: str) -> None:
    records = [one for part in (LOADER, *parts) for one in part]
    found = judge(RULE, TRAIN, survey=run(records, role="survey"))
    assert (found.status == "fail") == bool(words) and words in found.evidence
    assert not words or "% n == 0" in str(found.fix)


@cases(
    "parts",
    # divided by what it has, or the gradients by what the losses were not
    [window(1, 1.0), LOADER, FULL],
    [window(1, 0.25, 4.0), LOADER, FULL],
    # clipped by the script itself, weighed by tokens, or several losses
    [window(1, 0.25, 0.3), LOADER, FULL],
    [window(1, 0.31), LOADER, FULL],
    [window(1, None), LOADER, FULL],
    # not at the end of the data: a loss of a part of the steps
    [window(1, 0.25), FULL, window(1, 0.25)],
    # sums, or micro-batches of which each has its weight
    [window(4, 1.0), window(1, 0.25)],
    [DIVIDE, window(1, 0.25)],
    # an accumulation that grows
    [window(8, 0.125), LOADER, FULL],
    [],
)
def test_right(parts: list[Records]) -> None:
    assert judge(RULE, TRAIN, **survey(*parts)).status != "fail"


def test_the_scale_of_a_scaler_is_taken_away() -> None:
    full = [*window(4, 128.0, 1 / 512), *window(4, 128.0, 1 / 512)]
    short = [*LOADER, *full, *window(1, 128.0, 1 / 512)]
    assert judge(RULE, TRAIN, survey=run(short, role="survey")).status == "fail"
    right = [*LOADER, *full, *window(1, 512.0, 1 / 512)]
    assert judge(RULE, TRAIN, survey=run(right, role="survey")).status != "fail"


def _loss() -> torch.Tensor:
    return F.mse_loss(torch.ones(3, requires_grad=True), torch.zeros(3))


@cases(
    "given, expected",
    ((_loss() / 4,), 0.25),
    ((0.25 * _loss(),), 0.25),
    ((torch.tensor(0.25) * _loss(),), 0.25),
    ((_loss().div_(4) * 512,), 128.0),
    ((_loss() / 4, torch.tensor(0.5)), 0.125),
    (([_loss() / 4],), 0.25),
    ((_loss(),), 1.0),
    ((_loss() / _loss(),), 1.0),  # no constant
    ((_loss() / 4 + _loss() / 4,), 1.0),
    (([_loss(), _loss()],), None),
)
def test_constants_on_a_loss(given: tuple[Any, ...], expected: float | None) -> None:
    found = scale_of(Call(given, {}))
    assert found == (expected if expected is None else pytest.approx(expected))


def test_a_constant_is_read_where_cuda_computes_on_the_cpu() -> None:
    with Placement():  # type: ignore[no-untyped-call]
        assert scale_of(Call((_loss() / 4,), {})) == pytest.approx(0.25)

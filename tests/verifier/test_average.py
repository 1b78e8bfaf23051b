"""gloo-avg-is-sum: the measurement on this torch, and the verdict on what an older one gives."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from records import LINE, cases, micro, model, run, step, stepped, trace
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge, judge_one
from verified_fsdp2.verifier.launch.average import MEAN, RIGHT, average_of_one_and_two
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.rules import RULES


def verdict(average: float | None, version: str = "2.13.0+cpu") -> Finding:
    train = run([{"kind": "start", "torch": version}, model(), micro(), step(), stepped()])
    return judge_one(RULES["gloo-avg-is-sum"], Evidence(train=train, average=average))


@cases("average, status", (1.5, "pass"), (3.0, "fail"), (1.0, "fail"), (math.nan, "inconclusive"), (None, "pass"))
def test_what_was_measured_decides(average: float | None, status: str) -> None:
    assert verdict(average).status == status


def test_it_is_the_first_rule_and_turns_comparisons_into_consequences() -> None:
    assert next(iter(RULES)) == "gloo-avg-is-sum"
    rank = [model(), micro(), step(), stepped()]
    broken = run(rank, rank)
    end = {"kind": "end", "how": "exception", "error": "E", "message": "m", "frames": [LINE], "seq": 9, "at": 9.0}
    broken = replace(broken, traces=tuple(trace(old.rank, (*old.records[:-1], end)) for old in broken.traces))
    failed = [f for f in judge(Evidence(train=broken, average=3.0), list(RULES)) if f.status == "fail"]
    assert failed[0].rule == "gloo-avg-is-sum"
    assert [f.rule for f in failed if not f.consequence] == ["gloo-avg-is-sum"]


@pytest.mark.launch
def test_this_torch_averages(launcher: Launcher, tmp_path: Path) -> None:
    assert average_of_one_and_two(launcher, tmp_path / "known") is None
    assert launcher.versions["torch"].partition("+")[0] in RIGHT
    assert average_of_one_and_two(launcher, tmp_path / "asked", versions=()) == MEAN

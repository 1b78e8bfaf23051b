"""gloo-avg-is-sum: the measurement on this torch, and the verdict on what an older one gives."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from records import cases, judge, model, run, steps
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.execute import Executor
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.isolation.worlds import Worlds
from verified_fsdp2.verifier.launch.backend_probe import average_of_one_and_two
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.probe.compat import names
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.substitutes import averages
from verified_fsdp2.verifier.report.assemble import notes
from verified_fsdp2.verifier.rules import RULES


def verdict(average: float | None, version: str = "2.13.0+cpu") -> Finding:
    return judge("gloo-avg-is-sum", steps({"kind": "start", "torch": version}), average=average)


@cases(
    "average, status",
    (1.5, "pass"),
    (3.0, "fail"),
    (1.0, "fail"),
    (math.nan, "inconclusive"),
    (None, "pass"),
)
def test_what_was_measured_decides(average: float | None, status: str) -> None:
    assert verdict(average).status == status


def test_it_is_the_first_rule_and_a_warning() -> None:
    assert next(iter(RULES)) == "gloo-avg-is-sum"
    assert verdict(3.0).warns and not verdict(1.5).warns


@cases(
    "right, op, given",
    ((), dist.ReduceOp.SUM, 1.5),
    ((torch.__version__.partition("+")[0],), dist.ReduceOp.AVG, 3.0),
)
def test_where_gloo_sums_a_rank_sums_parts(
    monkeypatch: pytest.MonkeyPatch, right: Any, op: Any, given: float
) -> None:
    monkeypatch.setattr(names, "VERSIONS", dict.fromkeys(right, names.MEAN))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    call = Call((torch.zeros(1), torch.tensor([3.0, 3.0])), {"op": dist.ReduceOp.AVG})
    averages._reduced((1, 2))(call, lambda: None)
    assert (call.kwargs["op"], call.args[1].tolist()) == (op, [given, given])


@cases("version, noted", ("2.13.0+cpu", False), ("2.99.0", True))
def test_a_version_that_is_not_in_the_table_is_noted(version: str, noted: bool) -> None:
    evidence = Evidence(train=run([{"kind": "start", "torch": version}, model()]))
    assert any(version in note for note in notes(None, evidence, ())) is noted
    assert names.averages(version) is not noted


@cases(
    "version, there",
    ("2.6.0+cu124", False),
    ("2.7.1", True),
    ("2.13.0+cpu", True),
    ("3.0.0a0", True),
)
def test_which_torch_trains_on_the_cpu(version: str, there: bool) -> None:
    assert names.runs_on_cpu(version) is there


def test_this_torch_averages(launcher: Launcher, tmp_path: Path) -> None:
    assert not Executor(launcher, tmp_path, Worlds(tmp_path)).averages
    assert average_of_one_and_two(launcher, tmp_path) == names.MEAN

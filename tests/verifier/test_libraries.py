"""FSDP2 applied by libraries: adapters, the reference where DDP cannot stand in, random numbers of
recomputes, committed rows.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from records import Recorder, cases, micro, model, run, step, stepped
from trees import build_file_tree
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.probe.substitutes import libraries
from verified_fsdp2.verifier.rules.parity.matches_ddp import MatchesDdp

ROOT = Path(__file__).parents[2]

STATE = """
class DistributedType:
    MULTI_CPU, MULTI_GPU = "cpu", "gpu"

class PartialState:
    _shared_state = {}
    def __init__(self, cpu=False, **kwargs):
        self._shared_state.update(distributed_type=DistributedType.MULTI_CPU, cpu=cpu)

class AcceleratorState:
    _shared_state = {}
    def __init__(self, mixed_precision=None, cpu=False, **kwargs):
        if not PartialState._shared_state:
            PartialState(cpu)
        self._shared_state.update(PartialState._shared_state, **kwargs)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `accelerate.state` with what the adapter touches, imported with the adapter
    installed.
    """
    build_file_tree(tmp_path, {"accelerate/__init__.py": "", "accelerate/state.py": STATE})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    recorder = Recorder()
    libraries.install(recorder)
    yield importlib.import_module("accelerate.state"), recorder
    for name in ("accelerate", "accelerate.state"):
        sys.modules.pop(name, None)


@cases("asked, kind, recorded", ({"fsdp_plugin": object()}, "gpu", ["adapted"]), ({}, "cpu", []))
def test_accelerate_sees_accelerators_where_fsdp_is_asked_for(
    state: Any,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, object],
    kind: str,
    recorded: list[str],
) -> None:
    module, recorder = state
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    module.AcceleratorState("bf16", True, **asked)
    assert (
        module.AcceleratorState._shared_state["distributed_type"],
        [e.kind for e in recorder.events],
    ) == (
        kind,
        recorded,
    )


def test_the_finding_says_which_call_kept_ddp_out() -> None:
    rank = [model(), micro(loss=1.0), step(), stepped()]
    runs = {role: run(rank, rank, role=role) for role in ("train", "reference", "perturbed")}
    reason = "rank 0 raised AttributeError: 'Tensor' object has no attribute 'device_mesh'"
    found = MatchesDdp().judge(
        Evidence(**runs, full_precision=runs["train"], missing={"ddp": reason})
    )
    assert reason in found.evidence


def test_every_row_has_its_script_and_its_environments() -> None:
    folder = ROOT / "tests" / "libraries"
    rows = yaml.safe_load((folder / "rows.yaml").read_text())
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        base = ROOT / "tests" if row["script"].startswith(("zoo/", "faults/")) else folder
        assert (base / row["script"]).is_file(), row["name"]
        for name in (row["env"], row["fixed"].get("env", row["env"])):
            assert (folder / f"{name}.txt").is_file(), row["name"]


def test_the_committed_results_hold_every_row_as_expected() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "libraries.json").read_text())
    rows = {
        row["name"]: row
        for row in yaml.safe_load((ROOT / "tests" / "libraries" / "rows.yaml").read_text())
    }
    assert {result["name"] for result in results} == set(rows)
    for result in results:
        expected = rows[result["name"]]["rule"]
        assert result["found"]["rule"] in (
            expected if isinstance(expected, list) else [expected]
        ), result["name"]
        assert result["found"]["evidence"], result["name"]
        assert result["fixed"]["rule"] is None, result["name"]
        assert result["found"]["versions"]["torch"], result["name"]
        beside = {
            result["found"]["statuses"][rule] for rule in rows[result["name"]].get("beside", ())
        }
        assert beside <= {"fail"}, result["name"]

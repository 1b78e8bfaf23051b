"""Scripts that are written for GPUs, on a machine without one."""

import json
import os
from pathlib import Path

import pytest
import torch
from for_gpus import RESPELLED, for_gpus

from records import LINE, cases, end, run
from scripts import ZOO, Verify, edited, python, written
from verified_fsdp2.verifier.analysis.platform import asks_for_cuda, beyond_cuda_on_cpu
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.probe.compat.names import DTENSOR_PART
from verified_fsdp2.verifier.probe.substitutes.cuda_on_cpu.marks import mark_of
from verified_fsdp2.verifier.trace import Run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_what_training_code_calls() -> None:
    done = python(
        Path(__file__).with_name("cuda_calls.py"), env={**os.environ, "LOCAL_WORLD_SIZE": "2"}
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


IN_EVERY_TEST_RUN = ("run-completes", "matches-ddp", "gloo-premul-sum", "device-mismatch")


@cases(
    "only",
    IN_EVERY_TEST_RUN,
    pytest.param(
        (*IN_EVERY_TEST_RUN, "matches-single-process", "resume-is-exact"), marks=pytest.mark.full
    ),
)
def test_a_script_for_gpus_is_judged_unmodified(
    verify_script: Verify, only: tuple[str, ...]
) -> None:
    verdict = verify_script(ZOO / "written_for_gpus.py", only)
    found = {finding.rule: finding.status for finding in verdict.findings}
    assert found == {**dict.fromkeys(only, "pass"), "gloo-premul-sum": "not_applicable"}
    assert verdict.environment["cuda_on_cpu"] is True
    assert any("CUDA" in note for note in verdict.environment["notes"])


def test_gradients_that_are_not_averaged_fail_as_on_the_cpu(
    verify_script: Verify, tmp_path: Path
) -> None:
    wrong = edited(
        tmp_path, ("gradient_sync(micro == 1)", "gradient_sync(micro == 0)"), of="written_for_gpus"
    )
    (found,) = verify_script(wrong, ("accum-never-resynced",)).findings
    assert found.status == "fail"


def test_a_script_for_the_cpu_gets_no_cuda(verify_script: Verify) -> None:
    verdict = verify_script(ZOO / "minimal.py", ("run-completes", "device-mismatch"))
    assert verdict.environment["cuda_on_cpu"] is False
    found = {f.rule: f.status for f in verdict.findings}
    assert found == {"run-completes": "pass", "device-mismatch": "not_applicable"}


@pytest.mark.full
@pytest.mark.parametrize("name", RESPELLED)
def test_scripts_of_the_zoo_for_gpus(name: str, verify_script: Verify, tmp_path: Path) -> None:
    script = written(
        tmp_path, for_gpus((ZOO / f"{name}.py").read_text(encoding="utf-8")), f"{name}.py"
    )
    verdict = verify_script(script)
    assert verdict.environment["cuda_on_cpu"] is True
    assert [f for f in verdict.findings if f.status in ("fail", "error")] == []


@cases(
    "error, message, asks",
    ("AssertionError", "Torch not compiled with CUDA enabled", True),
    ("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", True),
    ("ModuleNotFoundError", "No module named 'flash_attn'", True),
    ("RuntimeError", "No available communication backend found on device type cpu.", True),
    ("AttributeError", "'_OpNamespace' 'kernels' object has no attribute 'flash_fwd'", True),
    ("ValueError", "the batch does not divide", False),
)
def test_which_errors_ask_for_cuda(error: str, message: str, asks: bool) -> None:
    assert asks_for_cuda(_stopped(error, message)) is asks


def test_any_rank_may_be_the_one_that_asks_for_cuda() -> None:
    """Ranks stop at different lines: here the first to stop found no device with its number."""
    made = _stopped(
        "RuntimeError",
        "the local rank is larger than the number of CPUs",
        "Torch not compiled with CUDA",
    )
    assert asks_for_cuda(made)


@pytest.mark.parametrize("asks", [True, False])
def test_a_script_that_ends_where_it_counts_gpus_asks_for_cuda(asks: bool) -> None:
    asked = [{"kind": "asks_for_accelerators"}] * asks
    ended = {"kind": "end", "how": "return"}
    assert asks_for_cuda(run([*asked, ended])) is asks
    assert asks_for_cuda(run([*asked, ended], role="survey")) is asks
    begun = {"kind": "reached", "steps": 3, "lines": {}, "backwards": 3, "stack": [LINE]}
    assert not asks_for_cuda(run([*asked, begun, ended], role="survey"))


def test_a_script_that_refuses_to_run_without_gpus(verify_script: Verify, tmp_path: Path) -> None:
    refuses = "import sys\nimport torch\nif torch.accelerator.device_count() < 2:\n    sys.exit()\n"
    script = written(tmp_path, refuses + (ZOO / "minimal.py").read_text(encoding="utf-8"))
    verdict = verify_script(script, ("run-completes",), steps="auto")
    assert verdict.environment["cuda_on_cpu"] is True
    assert verdict.facts["coverage"]["made"] > 0  # in the survey run, too
    assert [finding.status for finding in verdict.findings] == ["pass"]


def test_kernels_are_inconclusive_and_never_a_failure() -> None:
    stopped = _stopped("ModuleNotFoundError", "No module named 'flash_attn'")
    assert "flash_attn" in beyond_cuda_on_cpu(stopped)
    found = judge(Evidence(train=stopped, cuda_on_cpu=True), ["run-completes"])
    assert [finding.status for finding in found] == ["inconclusive"]


@cases(
    "message, status",
    ("No module named 'mlflow'", "inconclusive"),
    ("No module named 'project.missing'", "fail"),
    ("No module named 'torch.distributed._composable.fsdp2'", "fail"),
)
def test_a_package_that_is_not_installed_is_no_fault_of_the_script(
    message: str, status: str
) -> None:
    found = judge(Evidence(train=_stopped("ModuleNotFoundError", message)), ["run-completes"])
    assert [finding.status for finding in found] == [status]
    assert (
        "the script imports `mlflow`, which this Python does not find" in found[0].evidence
    ) is (status != "fail")


def _stopped(error: str, *messages: str) -> Run:
    """A run whose ranks stopped in the order of their numbers."""
    return run(*([end(error, text, at=float(rank))] for rank, text in enumerate(messages)))


def test_a_tensor_that_answers_as_its_own_local_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As parameters do where DDP stands in for `fully_shard`."""
    monkeypatch.setattr(torch.Tensor, DTENSOR_PART, property(lambda tensor: tensor), raising=False)
    assert mark_of(torch.ones(2).as_subclass(Own)) is None


class Own(torch.Tensor):
    """A class of tensors that is not torch's."""

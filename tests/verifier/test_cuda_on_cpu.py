"""Scripts that are written for GPUs, on a machine without one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_spelling import for_gpus

from records import LINE, cases, trace
from verified_fsdp2.verifier.analysis.platform import asks_for_cuda, beyond_cuda_on_cpu
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.probe.compat.names import DTENSOR_PART
from verified_fsdp2.verifier.probe.substitutes.cuda_on_cpu.marks import mark_of
from verified_fsdp2.verifier.trace import Ended, Run
from verified_fsdp2.verifier.verdict import Verdict

Verify = Callable[..., Verdict]
ZOO = Path(__file__).parents[1] / "zoo"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

RESPELLED = (
    *("minimal", "mixed_precision", "gradient_accumulation", "fp16_scaler", "autocast", "activation_checkpointing"),
    *("tied_embeddings", "manual_global_clip", "distributed_sampler", "ema", "checkpoint_functions", "hsdp"),
)


def test_what_training_code_calls() -> None:
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(Path(__file__).with_name("cuda_calls.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


IN_EVERY_TEST_RUN = ("run-completes", "matches-ddp", "gloo-premul-sum", "device-mismatch")


@pytest.mark.launch
@cases(
    "only",
    IN_EVERY_TEST_RUN,
    pytest.param((*IN_EVERY_TEST_RUN, "matches-single-process", "resume-is-exact"), marks=pytest.mark.full),
)
def test_a_script_for_gpus_is_judged_unmodified(verify_script: Verify, only: tuple[str, ...]) -> None:
    verdict = verify_script(ZOO / "written_for_gpus.py", only)
    found = {finding.rule: finding.status for finding in verdict.findings}
    assert found == {**dict.fromkeys(only, "pass"), "gloo-premul-sum": "not_applicable"}
    assert verdict.environment["cuda_on_cpu"] is True
    assert any("CUDA" in note for note in verdict.environment["notes"])


@pytest.mark.launch
def test_gradients_that_are_not_averaged_fail_as_on_the_cpu(verify_script: Verify, tmp_path: Path) -> None:
    text = (ZOO / "written_for_gpus.py").read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("gradient_sync(micro == 1)", "gradient_sync(micro == 0)"))
    (found,) = verify_script(wrong, ("accum-never-resynced",)).findings
    assert found.status == "fail"


@pytest.mark.launch
def test_a_script_for_the_cpu_gets_no_cuda(verify_script: Verify) -> None:
    verdict = verify_script(ZOO / "minimal.py", ("run-completes", "device-mismatch"))
    assert verdict.environment["cuda_on_cpu"] is False
    found = {f.rule: f.status for f in verdict.findings}
    assert found == {"run-completes": "pass", "device-mismatch": "not_applicable"}


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("name", RESPELLED)
def test_scripts_of_the_zoo_for_gpus(name: str, verify_script: Verify, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(for_gpus((ZOO / f"{name}.py").read_text(encoding="utf-8")), encoding="utf-8")
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
    run = _stopped("RuntimeError", "the local rank is larger than the number of CPUs", "Torch not compiled with CUDA")
    assert asks_for_cuda(run)


@pytest.mark.parametrize("asks", [True, False])
def test_a_script_that_ends_where_it_counts_gpus_asks_for_cuda(asks: bool) -> None:
    end = {"kind": "end", "how": "return", "seq": 1, "at": 0.0}
    asked = {"kind": "asks_for_accelerators", "at_line": LINE, "seq": 0, "at": 0.0}
    run = Run("train", 1, (trace(0, [asked, end] if asks else [end]),), (Ended(0, 0, False),))
    assert asks_for_cuda(run) is asks


@pytest.mark.launch
def test_a_script_that_refuses_to_run_without_gpus(verify_script: Verify, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (ZOO / "minimal.py").read_text(encoding="utf-8")
    script.write_text(f"import sys\nimport torch\nif torch.accelerator.device_count() < 2:\n    sys.exit()\n{text}")
    verdict = verify_script(script, ("run-completes",))
    assert verdict.environment["cuda_on_cpu"] is True
    assert [finding.status for finding in verdict.findings] == ["pass"]


def test_kernels_are_inconclusive_and_never_a_failure() -> None:
    stopped = _stopped("ModuleNotFoundError", "No module named 'flash_attn'")
    assert "flash_attn" in beyond_cuda_on_cpu(stopped)
    found = judge(Evidence(train=stopped, cuda_on_cpu=True), ["run-completes"])
    assert [finding.status for finding in found] == ["inconclusive"]


def _stopped(error: str, *messages: str) -> Run:
    """A run whose ranks stopped in the order of their numbers."""
    ends = [
        {
            "kind": "end",
            "how": "exception",
            "error": error,
            "message": text,
            "frames": [LINE],
            "seq": 0,
            "at": float(rank),
        }
        for rank, text in enumerate(messages)
    ]
    ended = tuple(Ended(rank, 1, False) for rank in range(len(ends)))
    return Run("train", len(ends), tuple(trace(rank, [end]) for rank, end in enumerate(ends)), ended)


def test_a_tensor_that_answers_as_its_own_local_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As parameters do where DDP stands in for `fully_shard`."""
    monkeypatch.setattr(torch.Tensor, DTENSOR_PART, property(lambda tensor: tensor), raising=False)
    assert mark_of(torch.ones(2).as_subclass(Own)) is None


class Own(torch.Tensor):
    """A class of tensors that is not torch's."""

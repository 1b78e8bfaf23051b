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

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "verifier" / "cuda_calls.md"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_what_training_code_calls() -> None:
    done = python(
        Path(__file__).with_name("cuda_calls.py"), env={**os.environ, "LOCAL_WORLD_SIZE": "2"}
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_table_has_the_calls_that_public_code_makes() -> None:
    counted = json.loads((ROOT / "benchmarks/results/cuda_calls.json").read_text(encoding="utf-8"))
    rows = [line for line in CALLS.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    shown = [line.strip("| ").split(" | ")[:2] for line in rows]
    expected = [[f"`{row['call']}`", str(row["repositories"])] for row in counted["calls"]]
    assert shown == expected
    assert len(counted["repositories"]) >= 60
    assert f"least three of {len(counted['repositories'])} public" in CALLS.read_text("utf-8")


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
    ("NotImplementedError", "\"histogram_cpu\" not implemented for 'Int'", True),
    ("RuntimeError", "Backend gloo does not implement startCoalescing", True),
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


_MESH = """
import os
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if torch.cuda.device_count() < 2:
    raise SystemExit("needs two GPUs")
assert not torch.cuda.is_initialized()
torch.manual_seed(0)
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(6):
    mine = rows[step * 8 : step * 8 + 8][mesh.get_rank() :: mesh.size()]
    staged = torch.empty_like(mine, pin_memory=True).copy_(mine)
    optimizer.zero_grad()
    model(staged.cuda(non_blocking=True)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_one_process_sees_the_devices_of_all_ranks(verify_script: Verify, tmp_path: Path) -> None:
    """pyFSDP2: no `set_device`, which the mesh calls, and it leaves where it counts one device."""
    only = ("run-completes", "matches-single-process", "device-mismatch", "set-device-missing")
    verdict = verify_script(written(tmp_path, _MESH), only)
    found = {finding.rule: finding.status for finding in verdict.findings}
    assert verdict.environment["cuda_on_cpu"] is True
    assert found["run-completes"] == found["matches-single-process"] == "pass"
    assert "fail" not in found.values()


_WITHOUT_GPUS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Linear(8, 4).to(device)
if torch.cuda.is_available():
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(6):
    mine = rows[step * 8 : step * 8 + 8][dist.get_rank() :: dist.get_world_size()]
    optimizer.zero_grad()
    model(mine.to(device)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@cases("steps", "auto", 3)
def test_a_script_that_shards_on_gpus_only_is_given_them(
    verify_script: Verify, tmp_path: Path, steps: str | int
) -> None:
    verdict = verify_script(written(tmp_path, _WITHOUT_GPUS), ("run-completes",), steps=steps)
    assert verdict.environment["cuda_on_cpu"] is True


def test_cuda_on_the_cpu_can_be_asked_for(verify_script: Verify) -> None:
    verdict = verify_script(ZOO / "minimal.py", ("run-completes",), device="cuda-on-cpu")
    assert verdict.environment["cuda_on_cpu"] is True
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

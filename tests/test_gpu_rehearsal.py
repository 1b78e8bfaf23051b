"""What waits for a GPU is rehearsed without one, so that no typo waits with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_the_measurements_of_a_gpu_are_rehearsed(tmp_path: Path) -> None:
    command = [
        ROOT / "benchmarks" / "gpu.sh",
        tmp_path / "gpu.json",
        "--rehearse",
        "--parts",
        "training",
        "saves",
    ]
    env = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    failed = {row["option"]: row["error"] for row in found["training"]["rows"] if "error" in row}
    assert list(failed) == ["compile, fp8"]
    assert "needs an NVIDIA GPU of compute capability 8.9" in failed["compile, fp8"]
    assert found["saves"]["ratio"].keys() == {"thread", "process"}


LOGGED = """\
for step in range(1, 9):
    memory = f"memory: {20 + step:5.2f}GiB(27%)"
    print(f"\\033[31mstep: {step}  \\033[38m{memory}  tps: 99,000  mfu: {30 + step}.00%\\033[39m")
"""


def test_another_trainer_beside_it(tmp_path: Path) -> None:
    (tmp_path / "titan.py").write_text(LOGGED, encoding="utf-8")
    found = gpu.beside(f"{sys.executable} {tmp_path}/titan.py")
    assert (found["mfu"], found["peak_memory_mib"]) == (0.37, 28 * 1024)
    assert gpu.beside("true")["error"] == "exit 0, and no line with memory, tps and mfu"


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [ROOT / "benchmarks" / "gpu.sh", tmp_path / "gpu.json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "there is no CUDA device: --rehearse makes the same on the CPU",
    )
    assert not (tmp_path / "gpu.json").exists()

"""AdamW with moments of 8 bits: close to AdamW, the same on any number of ranks, and bit for bit
after a resume.
"""

from pathlib import Path

import pytest
from test_scaffold_launch import assert_close, run

from scripts import python
from trees import DECODER, SMALL, write_project

SPEC = {
    **SMALL,
    "model": {**DECODER, "width": 64, "heads": 4, "ffn": 128},
    "optimizer": {"lr": 0.01},
    "train": {"steps": 20, "global_batch": 8},
}
EIGHT = "optimizer.kind=adamw8bit"
CLOSE = 2e-3  # of 9 steps with moments of 8 bits to those of AdamW: measured 3.3e-4
WITHOUT = """
import sys
sys.modules["torchao"] = None
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name == "torchao" else found(name, *rest)
import distributed, optim, settings
try:
    optim.build_optimizer(None, settings.Settings())
except distributed.SetupError as error:
    print(error)
"""
KINDS = """
import torch, torch.distributed as dist
import adamw8bit, distributed, model
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cpu")
net = model.build_model(model.ModelConfig(), distributed.build_mesh(device), device, 0)
optimizer = adamw8bit.AdamW8bit(
    net.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
)
net(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
optimizer.step()
wrong = []
for name, param in net.named_parameters():
    state = optimizer.state[param]
    for key in ("exp_avg", "exp_avg_sq"):
        dtype = torch.uint8 if param.ndim == 2 else torch.float32
        if state[key].dtype != dtype or state[key].shape != param.shape:
            wrong.append((name, key))
print(wrong)
dist.destroy_process_group()
"""


def test_without_torchao_the_start_says_what_to_install(tmp_path: Path) -> None:
    assert (
        "pip install torchao"
        in python("-c", WITHOUT, cwd=write_project(tmp_path, SPEC, EIGHT)).stdout
    )


def test_matrices_have_moments_of_8_bits(tmp_path: Path) -> None:
    assert (
        python("-c", KINDS, cwd=write_project(tmp_path, SPEC, EIGHT)).stdout.split("\n")[0] == "[]"
    )


@pytest.mark.full
@pytest.mark.launch
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.tp=2", "parallel.cpu_offload=true"),
        ("parallel.cp=2", "checkpoint.mode=thread"),
        ("model.experts={number: 4}", "parallel.ep=2", "checkpoint.mode=process"),
        ("parallel.dp_replicate=2", "finetune={kind: lora, rank: 64, targets: [query]}"),
    ],
    ids=" ".join,
)
def test_beside_other_features(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Matrices of a rank are 64 numbers wide or more: a block is the same on any ranks."""
    spec = {**SPEC, "model": {**DECODER, "width": 128, "heads": 4, "ffn": 128}}
    worlds = ("verify.nproc=4", "verify.reshard_to=[1]")
    project = write_project(tmp_path, spec, EIGHT, *worlds, *settings, "checkpoint.interval=2")
    straight = run(project, 1, tmp_path / "one", 5)
    assert_close(run(project, 4, tmp_path / "four", 5), straight, 1e-4)
    run(project, 4, tmp_path / "fewer", 2)
    assert_close(run(project, 1, tmp_path / "fewer", 5, "--resume"), straight, 1e-4)


@pytest.mark.full
@pytest.mark.launch
def test_one_trajectory_on_any_ranks(tmp_path: Path) -> None:
    """A resume is bit for bit; one on another number of ranks is within rounding."""
    for name in ("plain", "small"):
        (tmp_path / name).mkdir()
    plain = write_project(tmp_path / "plain", SPEC, "optimizer.kind=adamw")
    small = write_project(tmp_path / "small", SPEC, EIGHT, "checkpoint.interval=2")
    straight = run(small, 1, tmp_path / "one", 9)
    assert_close(straight, run(plain, 1, tmp_path / "plain-one", 9), CLOSE)
    assert_close(run(small, 4, tmp_path / "four", 9), straight, 1e-4)
    two = run(small, 2, tmp_path / "two", 9)
    assert_close(two, straight, 1e-4)
    run(small, 2, tmp_path / "two-again", 4)
    assert run(small, 2, tmp_path / "two-again", 9, "--resume") == two
    run(small, 2, tmp_path / "fewer", 4)
    assert_close(run(small, 1, tmp_path / "fewer", 9, "--resume"), straight, 1e-4)

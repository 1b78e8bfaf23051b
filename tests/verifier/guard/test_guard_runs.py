"""Guarded runs under torchrun: a flipped bit, a checkpoint and the end, a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

fault, steps, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
if os.path.exists(f"{out}/.metadata"):
    weights, states = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(held, checkpoint_id=out)
    begin = held["step"]
    if fault == "without":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        states = get_state_dict(model, optimizer)[1]
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=states)
for step in range(begin, steps):
    rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    if fault == "pause" and step == 15 and rank == 1:
        time.sleep(9)
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if fault == "flip" and step == 22 and rank == 1:
        local = model[0].weight.to_local().detach().view(torch.int32)
        local[3, 5] ^= 1
    if step + 1 == 20 and fault != "flip":
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states, "step": step + 1}, checkpoint_id=out)
if rank == 0:
    print("done")
dist.destroy_process_group()
"""


def run(folder: Path, ranks: int, *arguments: str, options: tuple[str, ...] = ()) -> int:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [sys.executable, "-m", "verified_fsdp2.skill", "guard", "--every", "10", *options]
    command += ["--out", str(folder / "guard.jsonl"), "--", str(torchrun), "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script), *arguments, str(folder / "saved")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, timeout=240, check=False).returncode


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("guard*.jsonl")):
        read = map(json.loads, path.read_text().splitlines())
        found += [line for line in read if line["kind"] == kind]
    return found


@pytest.mark.launch
def test_a_flipped_bit_is_named_and_the_run_saves_and_ends(tmp_path: Path) -> None:
    code = run(tmp_path, 2, "flip", "2000", options=("--on-breach", "checkpoint-and-stop"))
    assert code != 0
    (found,) = lines(tmp_path, "breach")[:1]
    assert (found["law"], found["step"], found["ranks"]) == ("replicas-agree", 30, [0, 1])
    assert found["names"][0] == "0.weight" and found["since"] == 20
    (saved,) = tmp_path.glob("guard.checkpoint-*")
    keys = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert "model.0.weight" in keys and "optimizer.state.0.weight.exp_avg" in keys
    assert lines(tmp_path, "error") == []


@pytest.mark.launch
def test_a_resume_on_other_ranks_is_held_against_its_save(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "right", "25") == 0
    assert run(tmp_path, 1, "right", "40") == 0
    assert lines(tmp_path, "breach") == [] and lines(tmp_path, "error") == []
    (back,) = lines(tmp_path, "resume")
    assert (back["step"], back["world"]) == (20, 2)
    assert run(tmp_path, 2, "without", "30") == 0
    laws = [(one["law"], one["message"].partition("): ")[2]) for one in lines(tmp_path, "breach")]
    assert laws[0][0] == "resume-as-saved"
    assert laws[0][1].startswith("optimizer: 0.bias.exp_avg and ")


@pytest.mark.launch
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "pause", "30", options=("--hang", "3")) == 0
    (found,) = [one for one in lines(tmp_path, "breach") if one["law"] == "hang"]
    line = 1 + SCRIPT.splitlines().index("        time.sleep(9)")
    assert found["place"].endswith(f"train.py:{line}") and found["ranks"] == [1]
    assert f"rank 1 in no collective at {tmp_path / 'train.py'}:{line}" in found["message"]
    assert "rank 0 in all_reduce at " in found["message"]

"""Opening checkpoints in one process: what is recorded of whole, strange, damaged and missing
ones.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from records import Recorder
from verified_fsdp2.verifier.probe.checkpoint_reader import open_all
from verified_fsdp2.verifier.probe.save_contents import entries

STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4)},
    "groups": [{"lr": 0.1, "params": [torch.ones(2)]}],
    "names": ["a", "b"],
    "step": 3,
}


def opened(path: Path) -> Any:
    recorder = Recorder()
    assert open_all([str(path)], recorder) == 0
    assert [event.kind for event in recorder.events] == ["inspected_checkpoint", "end"]
    return recorder.events[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_dcp_checkpoint_is_recorded_as_it_was_given(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c", no_dist=True)
    record = opened(tmp_path / "c")
    given = entries(STATE)
    assert (record.format, record.error, record.entries) == ("dcp", None, given)
    assert (given["step"].value, given["groups.0.params.0"].shape) == ("3", [2])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_lost_files_and_lost_metadata(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / "__0_0.distcp").unlink()
    assert opened(tmp_path / "c").missing_files == ["__0_0.distcp"]
    (tmp_path / "c" / ".metadata").unlink()
    assert "no .metadata" in opened(tmp_path / "c").error
    assert opened(tmp_path / "d").format == "missing"


def test_a_torch_file_with_plain_types_and_a_truncated_one(tmp_path: Path) -> None:
    whole = {**STATE, "args": argparse.Namespace(out=Path("x")), "random": random.getstate()}
    torch.save(whole, tmp_path / "a.pt")
    record = opened(tmp_path / "a.pt")
    assert (record.format, record.error, record.entries) == ("torch", None, entries(whole))
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: len(data) // 2])
    assert "RuntimeError" in opened(tmp_path / "a.pt").error


class Meter:
    """An object of the script's own, as a checkpoint may hold beside its tensors."""

    def __init__(self) -> None:
        self.values = [1.0]

    def __setstate__(self, state: object) -> None:
        raise AssertionError("code of the file was run")


def test_a_torch_file_with_objects_of_the_script(tmp_path: Path) -> None:
    """Its tensors are read, and no code of the object's class runs."""
    torch.save({**STATE, "meter": Meter(), "meters": [Meter()]}, tmp_path / "a.pt")
    record = opened(tmp_path / "a.pt")
    assert (record.format, record.error) == ("torch", None)
    assert {key: record.entries[key] for key in entries(STATE)} == entries(STATE)


def test_a_dtensor_on_a_part_of_a_mesh(tmp_path: Path) -> None:
    """A file of one rank: the process that reads it belongs to no group, and the mesh cannot say
    its ranks.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "shard"))
        given = {"w": distribute_tensor(torch.arange(4.0), mesh["shard"], [Shard(0)])}
        torch.save(given, tmp_path / "rank0.pt")
        expected = entries(given)
    finally:
        dist.destroy_process_group()
    assert (opened(tmp_path / "rank0.pt").error, opened(tmp_path / "rank0.pt").entries) == (
        None,
        expected,
    )

"""A run that goes on with other data: only those under another name start at their first sample."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from test_scaffold_launch import assert_close, run, steps_of

from scripts import forked, python
from trees import SMALL, write_project

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("alone")]
SPEC = {**SMALL, "train": {"steps": 20, "global_batch": 8}}


def taken(out: Path, step: int) -> tuple[int, str]:
    """Samples of the data so far, and the name of the data, in this checkpoint."""
    found = {"samples": 0, "data_name": ""}
    dcp.load(found, checkpoint_id=out / f"run-001/checkpoints/step_{step:08d}")
    return found["samples"], found["data_name"]


def test_mid_training_on_other_data(tmp_path: Path) -> None:
    """Steps, schedule and the optimizer's state go on; a second start finds its place again."""
    first, other, late, out = (tmp_path / name for name in ("first", "other", "late", "out"))
    for folder in (first, other, late):
        folder.mkdir()
    before = write_project(first, SPEC)
    run(before, 2, out, 4)
    spec = {**SPEC, "data": {"kind": "synthetic", "samples": 64}}
    project = write_project(other, spec)
    refused = python("train.py", "--out", out, "--resume", cwd=project, status=2)
    assert "training samples, the data have" in refused.stderr

    project = write_project(late, spec, "data.name=late")
    shown = forked(project, 2, "--out", out, "--steps", 6, "--resume")
    assert "new data, late after data without a name" in shown and "step      5  loss" in shown
    assert taken(out, 6) == (16, "late")
    assert "new data" not in forked(project, 2, "--out", out, "--steps", 8, "--resume")
    assert taken(out, 8) == (32, "late")
    found = steps_of(out)
    assert [line["step"] for line in found] == [*range(1, 9)]

    again = tmp_path / "again"
    run(before, 1, again, 4)
    assert_close(run(project, 1, again, 8, "--resume"), found, 5e-5)

"""The generated runs.py, imported and used in this process as the only rank: which run, which
checkpoint, is it whole.
"""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from checkpoint_project import Modules, flip, names, saved
from records import Capsys, Patch, cases
from scripts import written

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def runs(modules: Modules) -> ModuleType:
    modules.load()
    return __import__("runs")


def test_the_marker_is_what_sha256sum_writes_and_comes_last(
    modules: Modules, tmp_path: Path, monkeypatch: Patch
) -> None:
    module, runs = modules.load(), __import__("runs")
    seen: list[object] = []
    rename = Path.rename
    monkeypatch.setattr(runs, "sync", lambda path: seen.append(path.name))

    def renamed(path: Path, target: Path) -> Path:
        seen.extend([names(path)] if path.is_dir() else [])
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    saved(module, tmp_path / "run", 1)
    whole = [".metadata", "SHA256SUMS", "__0_0.distcp", "run.json"]
    assert seen == ["run.json", "SHA256SUMS", "step_00000001.tmp", whole, "checkpoints"]
    lines = (tmp_path / "run/checkpoints/step_00000001/SHA256SUMS").read_text().splitlines()
    assert sorted(line[64:] for line in lines) == ["  .metadata", "  __0_0.distcp"]
    assert all(re.fullmatch(r"[0-9a-f]{64}", line[:64]) for line in lines)


def test_every_bit_of_the_marker_counts(runs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"data")
    (tmp_path / ".metadata").write_bytes(b"more")
    sums = runs.checksums(tmp_path, runs.data_files(tmp_path))
    file = written(tmp_path, sums, "SHA256SUMS")
    assert runs.differences(file, sums) == []
    for place in range(len(sums)):
        for bit in range(8):
            data = bytearray(sums.encode())
            data[place] ^= 1 << bit
            file.write_bytes(data)
            assert runs.differences(file, sums), (place, bit)
    file.unlink()
    assert runs.differences(file, sums) == [".metadata", "__0_0.distcp"]


@cases(
    "damage, named",
    (lambda path: flip(path / "__0_0.distcp"), ["__0_0.distcp"]),
    (lambda path: flip(path / ".metadata"), [".metadata"]),
    (lambda path: (path / "__0_0.distcp").unlink(), ["__0_0.distcp"]),
    (lambda path: (path / ".metadata").unlink(), [".metadata"]),
    (lambda path: (path / "SHA256SUMS").unlink(), [".metadata", "__0_0.distcp"]),
    (lambda path: (path / "__1_0.distcp").write_bytes(b"of another save"), ["__1_0.distcp"]),
    (lambda path: (path / "notes.txt").write_text("mine"), []),
)
def test_damage_is_named(modules: Modules, tmp_path: Path, damage: Any, named: list[str]) -> None:
    saved(modules.load(), tmp_path / "run", 1)
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    damage(path)
    assert sorted(__import__("runs").damaged_files(path)) == named


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_taken(
    modules: Modules, tmp_path: Path, capsys: Capsys
) -> None:
    saved(modules.load(), tmp_path / "run", 3)
    runs = __import__("runs")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000003.damaged").mkdir()
    flip(folder / "step_00000003" / "__0_0.distcp")
    assert runs.newest_intact(tmp_path / "run") == folder / "step_00000002"
    aside = "(__0_0.distcp), it is step_00000003.damaged-again now\n"
    warning = capsys.readouterr().out.splitlines(True)[3]  # after a line for each save
    assert warning == f"warning: {folder / 'step_00000003'} is damaged {aside}"
    assert names(folder) == [
        "step_00000001",
        "step_00000002",
        "step_00000003.damaged",
        "step_00000003.damaged-again",
    ]
    for step in (1, 2):
        flip(folder / f"step_{step:08d}" / "SHA256SUMS", 3)
    assert runs.newest_intact(tmp_path / "run") is None
    with pytest.raises(runs.SetupError, match="nothing to resume: no complete checkpoint"):
        runs.open_run(tmp_path, resume=True)


def test_the_newest_run_that_has_a_checkpoint_is_resumed(modules: Modules, tmp_path: Path) -> None:
    module, runs = modules.load(), __import__("runs")
    out = tmp_path / "out"
    assert runs.open_run(out, resume=False) == (out / "run-001", None)
    with pytest.raises(runs.SetupError, match="nothing to resume"):
        runs.open_run(out, resume=True)
    for number in (2, 10, 999):
        saved(module, out / f"run-{number:03d}", 2)
    (out / "run-999x").mkdir()
    assert runs.open_run(out, resume=False) == (out / "run-1000", None)
    assert runs.open_run(out, resume=True) == (
        out / "run-999",
        out / "run-999/checkpoints/step_00000002",
    )


def test_what_a_crash_has_left_goes(modules: Modules, tmp_path: Path) -> None:
    saved(modules.load(), tmp_path / "run-001", 2)
    folder = tmp_path / "run-001" / "checkpoints"
    (folder / "step_00000003.tmp").mkdir()
    (folder / "step_00000003.tmp" / "__0_0.distcp").write_bytes(b"half")
    records = [{"step": step, "loss": 1.0} for step in (1, 2, 3)] + [
        {"step": 2, "validation_loss": 1.0}
    ]
    metrics = tmp_path / "run-001" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 2, "lo')
    __import__("runs").open_run(tmp_path, resume=True)
    assert names(folder) == ["step_00000001", "step_00000002"]
    kept = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in kept] == [1, 2, 2]


def test_a_restart_by_torchrun_goes_on_with_its_own_run_and_no_other(
    modules: Modules, tmp_path: Path, monkeypatch: Patch
) -> None:
    module, runs = modules.load(), __import__("runs")
    store = dist.HashStore()
    monkeypatch.setattr(runs, "torchrun_store", lambda: store)
    saved(module, tmp_path / "run-001", 2)
    assert runs.open_run(tmp_path, resume=False) == (tmp_path / "run-002", None)
    (tmp_path / "run-002" / "metrics.jsonl").write_text('{"step": 1}\n')
    saved(module, tmp_path / "run-003", 2)
    assert runs.open_run(tmp_path, resume=False) == (tmp_path / "run-002", None)
    assert (tmp_path / "run-002" / "metrics.jsonl").read_text() == ""
    shutil.copytree(
        tmp_path / "run-003" / "checkpoints",
        tmp_path / "run-002" / "checkpoints",
        dirs_exist_ok=True,
    )
    assert (
        runs.open_run(tmp_path, resume=False)[1] == tmp_path / "run-002/checkpoints/step_00000002"
    )
    store = dist.HashStore()
    third = tmp_path / "run-003"
    assert runs.open_run(tmp_path, resume=True) == (third, third / "checkpoints/step_00000002")


def test_an_output_folder_that_cannot_be_written(
    runs: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(runs.SetupError, match=f"{out}: .*Not a directory"):
            runs.open_run(out, resume=False)
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(runs, "TemporaryFile", refused)
    with pytest.raises(runs.SetupError, match="Permission denied"):
        runs.open_run(tmp_path, resume=False)


def test_the_failure_of_one_rank_reaches_all(runs: ModuleType, monkeypatch: Patch) -> None:
    def gather(results: list[Any], own: Any, group: Any) -> None:
        results[:] = [own, (None, "disk full")]

    monkeypatch.setattr(runs.dist, "all_gather_object", gather)
    with pytest.raises(runs.RankFailed, match="disk full"):
        runs.on_all_ranks(lambda: 1)

"""What a run finds: the folder of `{checkpoint}`, how its path is recorded, and the store."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_rules_checkpoint import saving, tensor

from records import cases, model, run, step, stepped
from scripts import ZOO, Verify, written
from verified_fsdp2.verifier import plan
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Course, Evidence
from verified_fsdp2.verifier.launch import manager, processes
from verified_fsdp2.verifier.launch.workspace import Workspace
from verified_fsdp2.verifier.pipeline import planned
from verified_fsdp2.verifier.trace import read_run
from verified_fsdp2.verifier.trace.events import Checkpoint
from verified_fsdp2.verifier.trace.writer import Writer

Leave = Callable[[Path], object]


def saved(work: Path, leave: Leave) -> Workspace:
    """After a train run that left these files."""
    files = Workspace(work)
    folder = begun(work, "01-train")
    checkpoint, trouble = files.begin(folder, (), "empty")
    assert not trouble
    leave(checkpoint)
    files.end(folder, (), keeps=True, leaves=False)
    return files


def begun(work: Path, name: str) -> Path:
    (work / name).mkdir(parents=True)
    return work / name


@cases(
    "leave",
    lambda folder: (folder / "model.pt").write_bytes(b"weights"),
    lambda folder: (folder / "empty").touch(),
    lambda folder: (folder / "step_1").mkdir() or (folder / "latest").symlink_to("step_1"),
)
def test_runs_that_resume_have_folders_of_their_own(leave: Leave, tmp_path: Path) -> None:
    files = saved(tmp_path, leave)
    left = sorted(path.name for path in files.checkpoint.iterdir())
    runs = [begun(tmp_path, name) for name in ("02-resume", "03-reshard")]
    own = [files.begin(run, (), "saved")[0] for run in runs]
    assert len({*own, files.checkpoint}) == 3
    assert [sorted(path.name for path in folder.iterdir()) for folder in own] == [left, left]
    (own[0] / "later").touch()
    assert not (own[1] / "later").exists() and not (files.checkpoint / "later").exists()
    files.end(runs[0], (), keeps=False, leaves=False)
    assert [folder.exists() for folder in (*own, files.checkpoint)] == [False, True, True]


@cases(
    "leave",
    lambda folder: (folder / "latest.json").write_text(f'"{folder}/step_1"'),
    lambda folder: (folder / "latest").symlink_to(folder / "step_1"),
    lambda folder: (folder.parent / "best.pt").write_bytes(b"weights"),
)
def test_files_that_name_their_folder_are_found_there(leave: Leave, tmp_path: Path) -> None:
    files = saved(tmp_path, leave)
    for name in ("02-resume", "03-reshard"):
        folder = begun(tmp_path, name)
        assert files.begin(folder, (), "saved") == (files.checkpoint, "")
        assert not (files.checkpoint / "later").exists()
        (files.checkpoint / "later").touch()
        files.end(folder, (), keeps=False, leaves=False)


def test_what_a_library_keeps_in_its_cache_is_prepared_once(verify_script: Verify, tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    place.mkdir()
    prepares = f"""
import os
from pathlib import Path
cache = Path({str(home)!r}, ".cache", "datasets")
if os.environ["RANK"] == "0" and not (cache / "table").exists():
    cache.mkdir(parents=True)
    (cache / "table").touch()
    with (cache.parent / "log").open("a") as log:
        log.write("prepared\\n")
"""
    script = written(place, prepares + (ZOO / "minimal.py").read_text(encoding="utf-8"))
    verdict = verify_script(script, ("run-completes", "matches-ddp"))
    assert len(verdict.runs) >= 2 and {finding.status for finding in verdict.findings} == {"pass"}
    assert (home / ".cache" / "log").read_text() == "prepared\n"


def test_a_run_finds_what_the_crash_left(tmp_path: Path) -> None:
    files = saved(tmp_path, lambda folder: (folder / "model.pt").write_bytes(b"weights"))
    crash = begun(tmp_path, "02-crash")
    checkpoint, _ = files.begin(crash, (), "scratch")
    (checkpoint / "half").touch()
    files.begin(begun(tmp_path, "03-resume"), (), "saved")
    files.end(crash, (), keeps=False, leaves=True)
    assert files.listing(left=True) == ("half",)
    assert files.begin(begun(tmp_path, "04-recovered"), (), "left") == (checkpoint, "")
    assert checkpoint != files.checkpoint


def test_the_folder_of_every_run_reads_as_the_common_one(tmp_path: Path) -> None:
    own, common = tmp_path / 'own "ü"', tmp_path / "common"
    Writer(tmp_path / "rank0.jsonl").write(Checkpoint(op="load", after_step=0, to=f"{own}/step_3", at_line=None))
    answer = {"ranks": [{"rank": 0, "code": 0, "killed": False, "at": 0.0}], "timed_out": False, "seconds": 1.0}
    run = read_run(tmp_path, "resume", answer, 1, "", place=(str(own), str(common)))
    assert [record.to for record in run.places(Checkpoint)] == [f"{common}/step_3"]


@cases("path, made", ("/c/step_1", ["crash"]), ("/elsewhere/step_1", []))
def test_no_save_of_a_crash_goes_to_files_of_the_user(path: str, made: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    settings = planned(resolve(tmp_path / "train.py", {"resume_args": "--resume"}), ["incomplete-checkpoint-chosen"])
    save = saving({"w": tensor()}, "torch.save", path)
    train = run([model(), step(), stepped(), save, step(2), stepped(2)])
    evidence = Evidence(train=train, course=Course(checkpoint="/c"))
    assert [one.role for one in plan.faults(settings, evidence, early=True)] == made


def test_a_store_that_dies_as_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store(*args: Any, **kwargs: Any) -> SimpleNamespace:
        if len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(os.getpid())).touch()
            os._exit(1)
        return SimpleNamespace(port=7)

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    before = set(processes.children(os.getpid()))
    assert manager._fork_store() == 7
    for pid in set(processes.children(os.getpid())) - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="the store process died"):
        manager._fork_store(attempts=2)

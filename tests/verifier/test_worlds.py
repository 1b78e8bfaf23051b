"""What a run finds: the files of earlier runs, how their paths are recorded, and the store."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import made_up_plan
from test_rules_checkpoint import saving, tensor

from records import cases, model, run, step, stepped
from scripts import ZOO, written
from verified_fsdp2.verifier import stages
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Course, Evidence
from verified_fsdp2.verifier.isolation import proc
from verified_fsdp2.verifier.isolation.choose import Choice
from verified_fsdp2.verifier.isolation.world import CHECKPOINT, FILES, World
from verified_fsdp2.verifier.isolation.worlds import Worlds, wish
from verified_fsdp2.verifier.launch import manager
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.trace import read_run
from verified_fsdp2.verifier.trace.events import Checkpoint
from verified_fsdp2.verifier.trace.writer import Writer

Leave = Callable[[Path], object]


def saved(work: Path, leave: Leave, mechanism: str) -> Worlds:
    """After a train run that left these files."""
    files = Worlds(work / "verification", [work / "project"], choice=Choice(mechanism))
    (work / "project").mkdir()
    world = files.begin(work / "verification" / "01-train", "empty")
    leave(Path(world.folder, FILES, CHECKPOINT))
    files.end(world, (), keeps=True, leaves=False)
    return files


def checkpoint(world: World) -> Path:
    """The folder of `{checkpoint}` in a world of its own paths."""
    return Path(world.checkpoint)


@cases(
    "leave",
    lambda folder: (folder / "model.pt").write_bytes(b"weights"),
    lambda folder: (folder / "empty").touch(),
    lambda folder: (folder / "step_1").mkdir() or (folder / "latest").symlink_to("step_1"),
    lambda folder: (folder / "step_1").mkdir() or (folder / "latest").symlink_to(folder / "step_1"),
)
def test_runs_that_resume_have_folders_of_their_own(leave: Leave, tmp_path: Path) -> None:
    files = saved(tmp_path, leave, "copy")
    left = [name for name in files.listing() if "/" not in name]
    worlds = [files.begin(tmp_path / name, "saved") for name in ("02-resume", "03-reshard")]
    own = [checkpoint(world) for world in worlds]
    assert not files.exclusive("saved") and len({*own, files.checkpoint}) == 3
    for folder in own:
        assert sorted(path.name for path in folder.iterdir()) == left
        assert all(path.resolve().is_relative_to(folder) for path in folder.iterdir())
    (own[0] / "later").touch()
    assert not (own[1] / "later").exists()
    files.end(worlds[0], (), keeps=False, leaves=False)
    assert [folder.exists() for folder in own] == [False, True]


def test_files_that_name_their_folder_are_found_there(tmp_path: Path) -> None:
    def leave(folder: Path) -> None:
        (folder / "latest.json").write_text(f'"{folder}/step_1"')
        (folder.parent / "best.pt").write_bytes(b"weights")

    files = saved(tmp_path, leave, "copy")
    assert files.exclusive("saved") and not files.exclusive("scratch")
    for name in ("02-resume", "03-reshard"):
        world = files.begin(tmp_path / name, "saved")
        assert str(checkpoint(world)) in (checkpoint(world) / "latest.json").read_text()
        assert (checkpoint(world).parent / "best.pt").read_bytes() == b"weights"
        assert not (checkpoint(world) / "later").exists()
        (checkpoint(world) / "later").touch()
        files.end(world, (), keeps=False, leaves=False)


def test_an_overlay_has_one_path_for_all_runs(tmp_path: Path) -> None:
    files = saved(tmp_path, lambda folder: (folder / "model.pt").write_bytes(b"weights"), "overlay")
    worlds = [
        files.begin(tmp_path / name, state) for name, state in (("02", "saved"), ("03", "scratch"))
    ]
    assert {world.checkpoint for world in worlds} == {str(files.checkpoint)}
    assert [len(world.bases) for world in worlds] == [1, 0] and not files.exclusive("saved")


def test_what_a_library_keeps_in_its_cache_is_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, place, work = (tmp_path / name for name in ("home", "project", "work"))
    for folder in (home, place, work):
        folder.mkdir()
    prepares = """
import os
from pathlib import Path
cache = Path.home() / ".cache" / "datasets"
if os.environ["RANK"] == "0" and not (cache / "table").exists():
    cache.mkdir(parents=True)
    (cache / "table").touch()
    with (cache.parent / "log").open("a") as log:
        log.write("prepared\\n")
"""
    script = written(place, prepares + (ZOO / "minimal.py").read_text(encoding="utf-8"))
    monkeypatch.setenv("HOME", str(home))
    rules = ("run-completes", "matches-ddp")
    with Launcher(wish=wish(work, place)) as launcher:
        if launcher.choice.mechanism != "overlay":
            pytest.skip("without an overlay each run has a cache of its own")
        verdict = verify_with(
            launcher, resolve(script, {"nproc": 2}), work / "own", select(rules, ())
        )
    assert len(verdict.runs) >= 2 and {finding.status for finding in verdict.findings} == {"pass"}
    (log,) = (work / "caches").rglob("log")
    assert log.read_text() == "prepared\n" and not list(home.iterdir())


@cases("mechanism", "copy", "overlay")
def test_a_run_finds_what_the_crash_left(mechanism: str, tmp_path: Path) -> None:
    files = saved(tmp_path, lambda folder: (folder / "model.pt").write_bytes(b"weights"), mechanism)
    crash = files.begin(tmp_path / "02-crash", "scratch")
    Path(crash.folder, FILES, CHECKPOINT, "half").touch()
    files.begin(tmp_path / "03-resume", "saved")
    files.end(crash, (), keeps=False, leaves=True)
    assert files.listing(left=True) == ("half",) and files.listing() == ("model.pt",)
    recovered = files.begin(tmp_path / "04-recovered", "left")
    assert crash.folder in (recovered.folder, *recovered.bases)


def test_the_folder_of_every_run_reads_as_the_common_one(tmp_path: Path) -> None:
    own, common = tmp_path / 'own "ü"', tmp_path / "common"
    Writer(tmp_path / "rank0.jsonl").write(
        Checkpoint(op="load", after_step=0, to=f"{own}/step_3", at_line=None)
    )
    answer = {
        "ranks": [{"rank": 0, "code": 0, "killed": False, "at": 0.0}],
        "timed_out": False,
        "seconds": 1.0,
    }
    run = read_run(tmp_path, "resume", answer, 1, "", places=[(str(own), str(common))])
    assert [record.to for record in run.places(Checkpoint)] == [f"{common}/step_3"]


@cases("path, made", ("/c/step_1", ["crash"]), ("/elsewhere/step_1", []))
def test_no_save_of_a_crash_goes_to_files_of_the_user(
    path: str, made: list[str], tmp_path: Path
) -> None:
    settings = made_up_plan(tmp_path, "incomplete-checkpoint-chosen", resume_args="--resume")
    save = saving({"w": tensor()}, "torch.save", path)
    train = run([model(), step(), stepped(), save, step(2), stepped(2)])
    evidence = Evidence(train=train, course=Course(checkpoint="/c"))
    assert [one.role for one in stages.faults(settings, evidence, early=True)] == made


def test_a_store_that_dies_as_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(*args: Any, **kwargs: Any) -> SimpleNamespace:
        if len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(os.getpid())).touch()
            os._exit(1)
        return SimpleNamespace(port=7)

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    before = set(proc.children(os.getpid()))
    assert manager._fork_store() == 7
    for pid in set(proc.children(os.getpid())) - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="the store process died"):
        manager._fork_store(attempts=2)

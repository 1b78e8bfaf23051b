"""The generated runs.py and checkpoint.py, imported and used in this process as the only rank."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verified_fsdp2.skill import scaffold, spec

OWN = ("distributed", "checkpoint", "runs", "export")
SPEC = {
    "version": 1,
    "model": {"kind": "import", "import": "own:Net", "shard": ["Linear"], "vocabulary": 8, "sequence_length": 8},
    "data": {"kind": "synthetic"},
    "train": {"steps": 20, "global_batch": 4},
    "verify": {"reshard_to": [4]},
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """project(mode, *settings) -> the generated module `checkpoint`; the others are importable then."""

    def write(mode: str = "sync", *settings: str) -> ModuleType:
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
        loaded = spec.load(tmp_path / "spec.yaml", [f"checkpoint.mode={mode}", *settings])
        scaffold.write(scaffold.render(loaded), tmp_path / "project")
        monkeypatch.syspath_prepend(str(tmp_path / "project"))
        return __import__("checkpoint")

    yield write
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.fixture
def runs(project: Any) -> ModuleType:
    project()
    return __import__("runs")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return hidden


def train_state(module: ModuleType, seed: int = 0) -> Any:
    """A model after one step."""
    torch.manual_seed(seed)
    model = fully_shard(Net())
    optimizer = AdamW(model.parameters(), lr=0.1)
    state = module.TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    forward(state)
    update(state)
    return state


def forward(state: Any) -> None:
    state.model(torch.arange(8)).square().sum().backward()


def update(state: Any) -> None:
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step, state.samples = state.step + 1, state.samples + 4


def held(state: Any) -> dict[str, Any]:
    """All that a checkpoint must bring back, copied."""
    found: dict[str, Any] = {"random": torch.get_rng_state().tolist(), "step": state.step, "samples": state.samples}
    for name, value in state.model.state_dict().items():
        found[name] = getattr(value, "full_tensor", lambda value=value: value)().tolist()
    for number, slot in enumerate(state.optimizer.state.values()):
        found |= {f"{number}.{k}": getattr(v, "full_tensor", lambda v=v: v)().tolist() for k, v in slot.items()}
    found["lr"] = [group["lr"] for group in state.optimizer.param_groups]
    found["schedule"] = state.scheduler.last_epoch
    return found


def saved(module: ModuleType, run: Path, steps: int, keep: int = 9) -> None:
    """A run with a checkpoint after each step."""
    (run / "checkpoints").mkdir(parents=True)
    state, checkpoints = train_state(module), module.Checkpointer(run, keep, 0)
    checkpoints.save(state)
    for _ in range(steps - 1):
        forward(state)
        update(state)
        checkpoints.save(state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(file: Path, place: int = 40) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_what_is_saved_is_the_state_at_the_call(project: Any, tmp_path: Path, mode: str) -> None:
    """A forward pass changes buffers and random numbers before the copy is done, an update all else after it."""
    module = project(mode)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    state = train_state(module)
    checkpoints = module.Checkpointer(tmp_path / "run", 2, 0)
    wanted = held(state)
    checkpoints.save(state)
    forward(state)
    torch.rand(3)
    if mode == "thread":
        checkpoints.before_update()
    update(state)
    if mode == "thread":
        checkpoints.close()
        assert not checkpoints.failed()
    assert held(state) != wanted
    assert names(folder) == ["step_00000001"]
    other = train_state(module, seed=1)
    module.load_checkpoint(folder / "step_00000001", other, seed=0)
    assert held(other) == wanted


def test_the_copy_of_an_earlier_save_is_not_overwritten_before_it_is_written(project: Any, tmp_path: Path) -> None:
    module = project("thread")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    state, checkpoints = train_state(module), module.Checkpointer(tmp_path / "run", 9, 0)
    wanted = []
    for _ in range(3):
        wanted.append(held(state))
        checkpoints.save(state)
        forward(state)
        checkpoints.before_update()
        update(state)
    checkpoints.close()
    for number, values in enumerate(wanted, start=1):
        other = train_state(module, seed=1)
        module.load_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{number:08d}", other, seed=0)
        assert held(other) == values


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_two_saves_of_one_step_are_one(project: Any, tmp_path: Path, mode: str) -> None:
    module = project(mode)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    state, checkpoints = train_state(module), module.Checkpointer(tmp_path / "run", 2, 0)
    checkpoints.save(state)
    checkpoints.save(state)
    before = (folder / "step_00000001" / ".metadata").stat().st_mtime_ns
    checkpoints.save(state)
    assert names(folder) == ["step_00000001"]
    assert (folder / "step_00000001" / ".metadata").stat().st_mtime_ns == before


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_save_that_fails_is_one_clear_error(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    module = project(mode)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000001").mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    state, checkpoints = train_state(module), module.Checkpointer(tmp_path / "run", 1, 0)
    state.step = 7
    with pytest.raises(module.TrainingError) as error:
        checkpoints.save(state)
        checkpoints.before_update()
        until = time.monotonic() + 20
        while not checkpoints.failed() and time.monotonic() < until:
            time.sleep(0.01)
        assert checkpoints.failed()
        checkpoints.save(state)
    told = str(error.value)
    assert told.startswith("step_00000007 could not be saved: OSError: [Errno 28] No space left on device (")
    assert re.search(rf"[\d,]+ MiB were free\); last good checkpoint: {folder}/step_00000001$", told)
    assert "\n" not in told
    assert names(folder) == ["step_00000001"]


def test_a_copy_that_fails_ends_before_the_update(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP reports a copy that fails at once as done; only its other future knows."""
    module = project("thread")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    state, checkpoints = train_state(module), module.Checkpointer(tmp_path / "run", 1, 0)
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("unable to allocate shared memory"))
    monkeypatch.setattr(checkpoints.stager, "stage", lambda *_: failed)
    checkpoints.save(state)
    checkpoints.written.exception(timeout=20)
    with pytest.raises(
        module.TrainingError, match="step_00000001 could not be saved: unable to allocate shared memory"
    ):
        checkpoints.before_update()


def test_a_save_that_is_too_slow_for_the_scheduler_is_told_once(
    project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = project("sync", "checkpoint.grace_seconds=5")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    state, checkpoints = train_state(module), module.Checkpointer(tmp_path / "run", 1, 0)
    checkpoints.since -= 4.0  # the step took this long
    checkpoints.save(state)
    assert "warning" not in capsys.readouterr().out
    for _ in range(2):
        checkpoints.since -= 6.0 * 2
        state.step += 2
        checkpoints.save(state)
    told = capsys.readouterr().out
    assert re.fullmatch(
        r"warning: a step and a save take 6\.\d s, and there are 5 s from SIGTERM to the kill\n", told
    ), told


def test_the_marker_is_what_sha256sum_writes_and_comes_last(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, runs = project(), __import__("runs")
    seen: list[object] = []
    rename = Path.rename
    monkeypatch.setattr(runs, "sync", lambda path: seen.append(path.name))

    def renamed(path: Path, target: Path) -> Path:
        seen.extend([names(path)] if path.is_dir() else [])
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    saved(module, tmp_path / "run", 1)
    whole = [".metadata", "SHA256SUMS", "__0_0.distcp"]
    assert seen == ["SHA256SUMS", "step_00000001.tmp", whole, "checkpoints"]
    lines = (tmp_path / "run/checkpoints/step_00000001/SHA256SUMS").read_text().splitlines()
    assert sorted(line[64:] for line in lines) == ["  .metadata", "  __0_0.distcp"]
    assert all(re.fullmatch(r"[0-9a-f]{64}", line[:64]) for line in lines)


def test_retention_keeps_the_newest_and_leaves_nothing_half(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = project()
    folder = tmp_path / "run" / "checkpoints"
    saved(module, tmp_path / "run", 3, keep=2)
    assert names(folder) == ["step_00000002", "step_00000003"]
    shutil.copytree(folder / "step_00000003", folder / "step_00000001.damaged")

    def crash(path: Path) -> None:
        (path / ".metadata").unlink()
        raise KeyboardInterrupt

    state = train_state(module)
    state.step = 4
    monkeypatch.setattr(module.dist, "all_gather_object", dist.all_gather_object)
    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        module.Checkpointer(tmp_path / "run", 1, 3).save(state)
    assert names(folder) == ["step_00000001.damaged", "step_00000002.tmp", "step_00000003", "step_00000004"]


def test_every_bit_of_the_marker_counts(runs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"data")
    (tmp_path / ".metadata").write_bytes(b"more")
    sums = runs.checksums(tmp_path, runs.data_files(tmp_path))
    file = tmp_path / "SHA256SUMS"
    file.write_text(sums)
    assert runs.differences(file, sums) == []
    for place in range(len(sums)):
        for bit in range(8):
            data = bytearray(sums.encode())
            data[place] ^= 1 << bit
            file.write_bytes(data)
            assert runs.differences(file, sums), (place, bit)
    file.unlink()
    assert runs.differences(file, sums) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: flip(path / "__0_0.distcp"), ["__0_0.distcp"]),
        (lambda path: flip(path / ".metadata"), [".metadata"]),
        (lambda path: (path / "__0_0.distcp").unlink(), ["__0_0.distcp"]),
        (lambda path: (path / ".metadata").unlink(), [".metadata"]),
        (lambda path: (path / "SHA256SUMS").unlink(), [".metadata", "__0_0.distcp"]),
        (lambda path: (path / "__1_0.distcp").write_bytes(b"of another save"), ["__1_0.distcp"]),
        (lambda path: (path / "notes.txt").write_text("mine"), []),
    ],
)
def test_damage_is_named(project: Any, tmp_path: Path, damage: Any, named: list[str]) -> None:
    saved(project(), tmp_path / "run", 1)
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    damage(path)
    assert sorted(__import__("runs").damaged_files(path)) == named


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_taken(
    project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(project(), tmp_path / "run", 3)
    runs = __import__("runs")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000003.damaged").mkdir()
    flip(folder / "step_00000003" / "__0_0.distcp")
    assert runs.newest_intact(tmp_path / "run") == folder / "step_00000002"
    told = capsys.readouterr().out
    assert told == (
        f"warning: {folder / 'step_00000003'} is damaged (__0_0.distcp), it is step_00000003.damaged-again now; "
        "the one before it is taken\n"
    )
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


def test_the_newest_run_that_has_a_checkpoint_is_resumed(project: Any, tmp_path: Path) -> None:
    module, runs = project(), __import__("runs")
    out = tmp_path / "out"
    assert runs.open_run(out, resume=False) == (out / "run-001", None)
    with pytest.raises(runs.SetupError, match="nothing to resume"):
        runs.open_run(out, resume=True)
    for number in (2, 10, 999):
        saved(module, out / f"run-{number:03d}", 2)
    (out / "run-999x").mkdir()
    assert runs.open_run(out, resume=False) == (out / "run-1000", None)
    assert runs.open_run(out, resume=True) == (out / "run-999", out / "run-999/checkpoints/step_00000002")


def test_what_a_crash_has_left_goes(project: Any, tmp_path: Path) -> None:
    saved(project(), tmp_path / "run-001", 2)
    folder = tmp_path / "run-001" / "checkpoints"
    (folder / "step_00000003.tmp").mkdir()
    (folder / "step_00000003.tmp" / "__0_0.distcp").write_bytes(b"half")
    records = [{"step": step, "loss": 1.0} for step in (1, 2, 3)] + [{"step": 2, "validation_loss": 1.0}]
    metrics = tmp_path / "run-001" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 2, "lo')
    __import__("runs").open_run(tmp_path, resume=True)
    assert names(folder) == ["step_00000001", "step_00000002"]
    kept = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in kept] == [1, 2, 2]


def test_a_restart_by_torchrun_goes_on_with_its_own_run_and_no_other(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, runs = project(), __import__("runs")
    store = dist.HashStore()
    monkeypatch.setattr(runs, "torchrun_store", lambda: store)
    saved(module, tmp_path / "run-001", 2)
    assert runs.open_run(tmp_path, resume=False) == (tmp_path / "run-002", None)
    (tmp_path / "run-002" / "metrics.jsonl").write_text('{"step": 1}\n')
    saved(module, tmp_path / "run-003", 2)
    assert runs.open_run(tmp_path, resume=False) == (tmp_path / "run-002", None)
    assert (tmp_path / "run-002" / "metrics.jsonl").read_text() == ""
    shutil.copytree(tmp_path / "run-003" / "checkpoints", tmp_path / "run-002" / "checkpoints", dirs_exist_ok=True)
    assert runs.open_run(tmp_path, resume=False)[1] == tmp_path / "run-002/checkpoints/step_00000002"
    store = dist.HashStore()
    assert runs.open_run(tmp_path, resume=True) == (
        tmp_path / "run-003",
        tmp_path / "run-003/checkpoints/step_00000002",
    )


def test_an_output_folder_that_cannot_be_is_told_at_the_start(runs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(runs.SetupError, match=f"all ranks must be able to write to {out}: .*Not a directory"):
            runs.open_run(out, resume=False)


def test_a_folder_that_a_rank_cannot_write_to(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(runs, "TemporaryFile", refused)
    with pytest.raises(runs.SetupError, match="Permission denied"):
        runs.open_run(tmp_path, resume=False)


def test_a_checkpoint_of_another_model_is_refused_in_one_line(project: Any, tmp_path: Path) -> None:
    module = project()
    saved(module, tmp_path / "run", 1)
    state = train_state(module)
    state.model.more = nn.Linear(2, 2)
    with pytest.raises(module.SetupError, match=r"does not fit this project: .*more\.weight") as error:
        module.load_checkpoint(tmp_path / "run/checkpoints/step_00000001", state, seed=0)
    assert "\n" not in str(error.value)


def test_the_failure_of_one_rank_reaches_all(runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(results: list[Any], own: Any, group: Any) -> None:
        results[:] = [own, (None, "disk full")]

    monkeypatch.setattr(runs.dist, "all_gather_object", gather)
    with pytest.raises(runs.RankFailed, match="disk full"):
        runs.on_all_ranks(lambda: 1)


def test_export_holds_the_weights_of_the_model(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = project("sync", "checkpoint.export=true")
    export = __import__("export")
    saved(module, tmp_path / "run", 2)
    checkpoint, out = tmp_path / "run" / "checkpoints" / "step_00000002", tmp_path / "weights.safetensors"

    def run(*arguments: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        try:
            export.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert run(checkpoint, out) == 0
    found = safetensors.load_file(out)
    state = train_state(module)
    module.load_checkpoint(checkpoint, state, seed=0)
    wanted = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in state.model.state_dict().items()}
    tied = wanted.pop("head.weight")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and torch.equal(
        tied, wanted["embedding.weight"]
    )
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"step": "2", "tied": '[["head.weight", "embedding.weight"]]'}
    capsys.readouterr()

    assert run(checkpoint, tmp_path / "nowhere" / "weights.safetensors") == 2
    assert run(tmp_path / "run", out) == 2
    flip(checkpoint / ".metadata")
    assert run(checkpoint, tmp_path / "more.safetensors") == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["error"] * 3
    assert "cannot be written" in told[0] and "no SHA256SUMS" in told[1] and "is damaged: .metadata" in told[2]
    assert names(tmp_path) == ["project", "run", "spec.yaml", "weights.safetensors"]
    assert all(torch.equal(value, wanted[name]) for name, value in safetensors.load_file(out).items())


def test_export_says_what_to_install(
    project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project("sync", "checkpoint.export=true")
    export = __import__("export")
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["export.py", str(tmp_path), str(tmp_path / "x")])
    with pytest.raises(SystemExit) as end:
        export.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: a package is missing: pip install safetensors\n"

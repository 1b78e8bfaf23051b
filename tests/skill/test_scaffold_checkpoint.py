"""The generated checkpoint.py and export.py, imported and used in this process as the only rank."""

import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from checkpoint_project import (
    Modules,
    flip,
    forward,
    held,
    names,
    saved,
    started,
    train_state,
    update,
)
from records import Capsys, Patch
from scripts import wait_until
from trees import code_of

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_what_is_saved_is_the_state_at_the_call(
    modules: Modules, tmp_path: Path, mode: str
) -> None:
    """A forward pass changes buffers before the copy is done, an update all else after it."""
    module = modules.load(mode)
    folder = tmp_path / "run" / "checkpoints"
    state, checkpoints = started(module, tmp_path / "run", 2)
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
    module.load_checkpoint(folder / "step_00000001", other)
    assert held(other) == wanted


@pytest.mark.parametrize("torch", ["2.13", "2.11"])
def test_the_copy_of_an_earlier_save_is_not_overwritten_before_it_is_written(
    modules: Modules, tmp_path: Path, torch: str
) -> None:
    module = modules.load("thread", f"torch='{torch}'")
    state, checkpoints = started(module, tmp_path / "run", 9)
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
        module.load_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{number:08d}", other)
        assert held(other) == values


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_two_saves_of_one_step_are_one(modules: Modules, tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run" / "checkpoints"
    state, checkpoints = started(modules.load(mode), tmp_path / "run", 2)
    for _ in range(2):
        checkpoints.save(state)
    before = (folder / "step_00000001" / ".metadata").stat().st_mtime_ns
    checkpoints.save(state)
    assert names(folder) == ["step_00000001"]
    assert (folder / "step_00000001" / ".metadata").stat().st_mtime_ns == before


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_save_that_fails_is_one_clear_error(
    modules: Modules, tmp_path: Path, monkeypatch: Patch, mode: str
) -> None:
    module = modules.load(mode)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_00000001").mkdir(parents=True)

    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    state, checkpoints = started(module, tmp_path / "run", 1)
    state.step = 7
    with pytest.raises(module.TrainingError) as error:
        checkpoints.save(state)
        checkpoints.before_update()
        wait_until(20, checkpoints.failed)
        checkpoints.save(state)
    message = str(error.value)
    assert message.startswith("step_00000007 could not be saved: OSError: [Errno 28] ")
    assert re.search(
        rf"[\d,]+ MiB were free\); last good checkpoint: {folder}/step_00000001$", message
    )
    assert "\n" not in message
    assert names(folder) == ["step_00000001"]


def test_a_copy_that_fails_ends_before_the_update(
    modules: Modules, tmp_path: Path, monkeypatch: Patch
) -> None:
    """DCP reports a copy that fails at once as done; only its other future knows."""
    module = modules.load("thread")
    state, checkpoints = started(module, tmp_path / "run", 1)
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("unable to allocate shared memory"))
    monkeypatch.setattr(checkpoints.stager, "stage", lambda *_: failed)
    checkpoints.save(state)
    checkpoints.written.exception(timeout=20)
    message = "step_00000001 could not be saved: unable to allocate shared memory"
    with pytest.raises(module.TrainingError, match=message):
        checkpoints.before_update()


def test_a_save_that_is_too_slow_is_reported_once(
    modules: Modules, tmp_path: Path, capsys: Capsys
) -> None:
    module = modules.load("sync", "checkpoint.grace_seconds=100")
    state, checkpoints = started(module, tmp_path / "run", 1)
    checkpoints.since -= 40.0  # the step took this long
    checkpoints.save(state)
    assert "warning" not in capsys.readouterr().out
    for _ in range(2):
        checkpoints.since -= 60.0 * 2
        state.step += 2
        checkpoints.save(state)
    message = "".join(
        line for line in capsys.readouterr().out.splitlines(True) if not line.startswith("saved ")
    )
    assert re.fullmatch(r"warning: .* 1\d\d\.\d s, .* 100 s from SIGTERM .*\n", message), message


def test_retention_keeps_the_newest_and_nothing_half(
    modules: Modules, tmp_path: Path, monkeypatch: Patch
) -> None:
    module = modules.load()
    folder = tmp_path / "run" / "checkpoints"
    saved(module, tmp_path / "run", 3, keep=2)
    assert names(folder) == ["step_00000002", "step_00000003"]
    shutil.copytree(folder / "step_00000003", folder / "step_00000001.damaged")

    def crash(path: Path) -> None:
        (path / ".metadata").unlink()
        raise KeyboardInterrupt

    state = train_state(module)
    state.step = 4
    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        module.Checkpointer(tmp_path / "run", 1, 3).save(state)
    assert names(folder) == [
        "step_00000001.damaged",
        "step_00000002.tmp",
        "step_00000003",
        "step_00000004",
    ]


def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    modules: Modules, tmp_path: Path
) -> None:
    module = modules.load()
    saved(module, tmp_path / "run", 1)
    state = train_state(module)
    state.model.more = nn.Linear(2, 2)
    with pytest.raises(module.SetupError, match=r"more\.weight") as error:
        module.load_checkpoint(tmp_path / "run/checkpoints/step_00000001", state)
    assert "\n" not in str(error.value)


def export(*arguments: Path) -> int:
    return code_of(__import__("export"), *arguments)


def test_export_holds_the_weights_of_the_model(
    modules: Modules, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    module = modules.load("sync", "checkpoint.export=true")
    saved(module, tmp_path / "run", 2)
    checkpoint, out = (
        tmp_path / "run" / "checkpoints" / "step_00000002",
        tmp_path / "weights.safetensors",
    )
    assert export(checkpoint, out) == 0
    found = load_file(out)
    state = train_state(module)
    module.load_checkpoint(checkpoint, state)
    wanted = {
        k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in state.model.state_dict().items()
    }
    tied = wanted.pop("head.weight")
    assert found.keys() == wanted.keys()
    assert torch.equal(tied, wanted["embedding.weight"])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"step": "2", "tied": '[["head.weight", "embedding.weight"]]'}
    capsys.readouterr()

    assert export(checkpoint, tmp_path / "nowhere" / "weights.safetensors") == 2
    assert export(tmp_path / "run", out) == 2
    flip(checkpoint / ".metadata")
    assert export(checkpoint, tmp_path / "more.safetensors") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error"] * 3
    assert (
        "cannot be written" in lines[0]
        and "no SHA256SUMS" in lines[1]
        and "is damaged: .metadata" in lines[2]
    )
    assert names(tmp_path) == ["project", "run", "spec.yaml", "weights.safetensors"]
    assert all(torch.equal(value, wanted[name]) for name, value in load_file(out).items())
    monkeypatch.setattr(__import__("export"), "find_spec", lambda _: None)
    assert export(checkpoint, tmp_path / "x") == 2
    assert capsys.readouterr().err == "error: a package is missing: pip install safetensors\n"

"""What a start records, what a resume shows and applies, and the last save after a signal."""

import json
import signal
import sys
from pathlib import Path

import pytest
from test_scaffold_launch import SPEC, assert_close, finish, run, start, steps_of

from checkpoint_project import Modules, train_state
from records import Capsys, Patch, cases
from scripts import forked
from trees import DECODER, Generate, write_project


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project, and beside it a run of three steps."""
    folder = tmp_path_factory.mktemp("record")
    finish(start(write_project(folder, SPEC), 1, folder / "out", "--steps", "3"))
    return folder


@pytest.mark.launch
def test_a_changed_rate_takes_effect_on_resume_and_is_shown(stopped: Path, tmp_path: Path) -> None:
    project = stopped / "project"
    whole = forked(project, 1, "--out", tmp_path, "--steps", 6)
    assert "resume: " not in whole
    record = json.loads((stopped / "out/run-001/run.json").read_text())
    saved = stopped / "out/run-001/checkpoints/step_00000003/run.json"
    assert json.loads(saved.read_text()) == record
    assert (record["settings"]["lr"], record["settings"]["steps"]) == (0.01, 3)
    assert {"command", "versions", "git", "ranks", "data", "spec"} <= record.keys()
    assert record["command"][-2:] == ["--steps", "3"] and sum(record["ranks"].values()) == 1
    shown = forked(project, 1, "--out", stopped / "out", "--steps", 6, "--lr", 0.005, "--resume")
    lines = [line for line in shown.splitlines() if line.startswith("resume: ")]
    assert lines == ["resume: settings.steps 3 -> 6", "resume: settings.lr 0.01 -> 0.005"]
    straight, found = steps_of(tmp_path), steps_of(stopped / "out")
    assert found[:4] != straight[:4] and found[:3] == straight[:3]
    rates = [record["lr"] for record in found]
    assert rates == [*(r["lr"] for r in straight[:3]), *(r["lr"] / 2 for r in straight[3:])]
    assert found[3]["loss"] == straight[3]["loss"]  # the weights are those of the checkpoint
    refused = finish(start(project, 1, stopped / "out", "--seed", "1", "--resume"), status=2)
    assert refused.splitlines()[-1].startswith("error: --seed was 0")


def test_settings_of_this_start_replace_those_of_the_checkpoint(
    modules: Modules, alone: None
) -> None:
    module = modules.load()
    state = train_state(module, lr=0.05)
    before = [
        {key: group[key] for key in module.SETTINGS} for group in state.optimizer.param_groups
    ]
    for group in state.optimizer.param_groups:
        group.update(lr=0.7, initial_lr=0.7, weight_decay=0.3)
    state.scheduler.last_epoch = 4
    module.apply_settings(state, before)
    (group,) = state.optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.05 * (1 / 5), 0.05, 0.01)
    assert state.scheduler.base_lrs == [0.05]
    state.optimizer.step()
    state.scheduler.step()
    assert group["lr"] == 0.05 * (1 / 6)


@cases(
    "old, new, lines",
    ({"settings": {"lr": 1.0}}, {"settings": {"lr": 1.0}}, []),
    (
        {"versions": {"torch": "2.12"}},
        {"versions": {"torch": "2.13"}},
        ["versions.torch 2.12 -> 2.13"],
    ),
    ({"ranks": {"a": 2}}, {"ranks": {"a": 1, "b": 1}}, ["ranks.a 2 -> 1", "ranks.b None -> 1"]),
    (
        {"settings": {"out": "a"}, "command": ["x"]},
        {"settings": {"out": "b"}, "command": ["y"]},
        [],
    ),
    (
        {"spec": ["a: 1", "b: 2"]},
        {"spec": ["a: 1", "b: 3"]},
        ["spec.yaml -b: 2", "spec.yaml +b: 3"],
    ),
    ({"data": {"samples": 1}}, {"data": {"samples": 2}}, ["data.samples 1 -> 2"]),
)
def test_differences_are_named_one_line_each(
    generate: Generate, old: object, new: object, lines: list[str]
) -> None:
    assert [*generate(SPEC, "record").differences(old, new)] == lines


@cases(
    "flags, said",
    (["--lr", "nan"], "lr must be 0 or more"),
    (["--global-batch", "0"], "global_batch must be 1 or more"),
    (["--schedule-steps", "2"], "warmup_steps must be less than schedule_steps"),
    (["--steps", "x"], "invalid int value"),
)
def test_a_bad_flag_is_named(
    generate: Generate, monkeypatch: Patch, capsys: Capsys, flags: list[str], said: str
) -> None:
    module = generate(SPEC, "settings")
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with pytest.raises(SystemExit) as caught:
        module.parse_settings()
    assert caught.value.code == 2 and said in capsys.readouterr().err


GROUPED = {**DECODER, "heads": 4, "kv_heads": 2}
SHAPED = {**SPEC, "model": GROUPED, "operation": {"shape_flags": True}}


@cases(
    "flags, said",
    (["--widht", "64"], "unknown: --widht; did you mean --width?"),
    (["--width", "60"], "--width 60 must be a multiple of 2 x --heads 4"),
    (["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
    (["--layers", "0"], "--layers must be more than 0, not 0"),
    (["--beta2", "1"], "beta1 and beta2 must be less than 1"),
    (["--width", "wide"], "argument --width: invalid int value: 'wide'"),
)
def test_a_bad_shape_is_one_line(
    generate: Generate, monkeypatch: Patch, capsys: Capsys, flags: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    module = generate(SHAPED, "settings")
    with pytest.raises(SystemExit) as caught:
        module.parse_settings()
    assert caught.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.launch
def test_a_run_goes_on_with_its_shape_alone(tmp_path: Path) -> None:
    project, out = write_project(tmp_path, SHAPED), tmp_path / "out"
    sizes = ("--width", "48", "--kv-heads", "4", "--layers", "1")
    flags = (*sizes, "--beta2", "0.99", "--keep", "1", "--checkpoint-interval", "1")
    straight = run(project, 1, tmp_path / "straight", 6, *flags)
    run(project, 1, out, 3, *flags)
    refused = finish(start(project, 1, out, "--resume"), status=2).splitlines()[-1]
    assert refused.endswith("has another shape; go on with --layers 1 --width 48 --kv-heads 4")
    assert_close(run(project, 2, out, 6, *flags, "--resume"), straight)
    assert [path.name for path in (out / "run-001" / "checkpoints").iterdir()] == ["step_00000006"]


def test_flags_are_typed_and_default_to_the_spec(generate: Generate, monkeypatch: Patch) -> None:
    module = generate(SPEC, "settings")
    flags = ["--lr", "1", "--warmup-steps", "4", "--seed", "9", "--max-norm", "2", "--resume"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    found = module.parse_settings()
    assert (found.lr, found.warmup_steps, found.seed, found.max_norm, found.resume) == (
        1.0,
        4,
        9,
        2.0,
        True,
    )
    assert isinstance(found.lr, float) and (found.steps, found.global_batch, found.out) == (
        20,
        8,
        "out",
    )


@pytest.mark.launch
def test_the_last_save_after_a_signal_starts_no_process(tmp_path: Path) -> None:
    """Its start takes longer than the scheduler may give: here it is as if it never ended."""
    project = write_project(tmp_path, SPEC, "checkpoint.mode=process")
    file = project / "checkpoint.py"
    text = file.read_text()
    assert text.count("response = dcp.async_save(") == 1
    file.write_text(text.replace("response = dcp.async_save(", "response = time.sleep("))
    process = start(
        project, 1, tmp_path / "out", "--steps", "1000000", "--checkpoint-interval", "1000000"
    )
    shown = ""
    for line in process.stdout or ():
        shown += line
        if line.startswith("step      3"):
            break
    process.send_signal(signal.SIGTERM)
    shown += finish(process)
    last = steps_of(tmp_path / "out")[-1]["step"]
    saved, ended = shown.splitlines()[-2:]
    assert saved.startswith(f"saved step_{last:08d}, ") and ended.startswith("stopped by a signal")
    assert [path.name for path in (tmp_path / "out/run-001/checkpoints").iterdir()] == [
        f"step_{last:08d}"
    ]

"""The generated retention.py, by what is left of the checkpoints of a run."""

import json
from pathlib import Path

import pytest

from checkpoint_project import Modules, forward, names, started, update
from records import cases
from trees import SMALL, write_project
from verified_fsdp2.skill.spec import SpecError

LOSSES = {2: 5.0, 4: 3.0, 6: 3.5, 8: None, 10: 4.0}


@pytest.mark.usefixtures("alone")
@cases(
    "settings, keep, left",
    (["checkpoint.keep_every=300"], 1, [3, 6, 9, 11]),
    (["checkpoint.keep_best=true", "train.validate_interval=100"], 2, [4, 10, 11]),
    (
        ["checkpoint.keep_every=300", "checkpoint.keep_best=true", "train.validate_interval=50"],
        1,
        [3, 4, 6, 9, 11],
    ),
)
def test_what_is_left(
    modules: Modules, tmp_path: Path, settings: list[str], keep: int, left: list[int]
) -> None:
    """A validation comes after the save of its step, as in train.py; JSON has null for a NaN."""
    module, retention = modules.load("sync", *settings), __import__("retention")
    if hasattr(retention, "KEEP_EVERY"):
        retention.KEEP_EVERY = 3
    state, checkpoints = started(module, tmp_path / "run", keep)
    history = tmp_path / "run/metrics.jsonl"
    history.write_text('{"step": 1, "loss": 0.1}\n')
    for step in range(1, 12):
        checkpoints.save(state)
        with history.open("a") as file:
            if step in LOSSES:
                file.write(json.dumps({"step": step, "validation_loss": LOSSES[step]}) + "\n")
        forward(state)
        update(state)
    assert names(tmp_path / "run/checkpoints") == [f"step_{step:08d}" for step in left]


@cases(
    "settings, message",
    (["checkpoint.keep_every=250"], "keep_every must be a multiple of checkpoint.interval 100"),
    (["checkpoint.keep_best=true"], "needs validations of steps that are saved: .* found 0"),
    (["checkpoint.keep_best=true", "train.validate_interval=70"], "or divide it, found 70"),
)
def test_refused_in_the_spec(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        write_project(tmp_path, {**SMALL, "train": {"steps": 900, "global_batch": 8}}, *settings)

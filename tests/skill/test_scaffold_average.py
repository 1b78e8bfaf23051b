"""The mean of the weights in the state of the optimizer: validated, exported, and restored on any
number of ranks.
"""

import json
from pathlib import Path

import pytest
import torch
from test_scaffold_launch import assert_close, run
from test_scaffold_schedule_free import TOKENS, step, validated_again

from model_project import built, imported, values, write
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill.spec import SpecError

DECAY = "optimizer.average_decay=0.3"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "sgd", "sgd, momentum: 0"])
def test_the_mean_of_four_steps(tmp_path: Path, kind: str) -> None:
    """Its formula in float64; a forward in between leaves nothing gathered."""
    with imported(write(tmp_path, DECODER, f"optimizer={{kind: {kind}}}", DECAY)) as modules:
        model, average = built(modules), modules["average"]
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
        average.keep_average(optimizer)
        wanted: dict[str, torch.Tensor] = {}
        for number in range(1, 5):
            step(model, optimizer, 0.01)
            decay = min(0.3, (1 + number) / (10 + number))
            for name, value in values(model).items():
                mean = wanted.get(name, value.double())
                wanted[name] = decay * mean + (1 - decay) * value.double()
        with torch.no_grad():
            before, trained = model(TOKENS), values(model)
            with average.averaged(model, optimizer):
                mean, of_mean = values(model), model(TOKENS)
            assert torch.equal(model(TOKENS), before) and not torch.equal(of_mean, before)
    for name, value in wanted.items():
        torch.testing.assert_close(mean[name].double(), value, rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.equal(mean[name], trained[name]) for name in mean)


@pytest.mark.parametrize("kind", ["schedule_free", "muon"])
def test_refused_in_the_spec(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SpecError, match=f"'average_decay' in optimizer of kind '{kind}'"):
        write(tmp_path, DECODER, f"optimizer.kind={kind}", "schedule.kind=constant", DECAY)


@pytest.mark.full
@pytest.mark.launch
def test_it_changes_no_step_and_is_the_same_on_any_ranks(tmp_path: Path) -> None:
    """The weights of an export are those that were validated."""
    spec = {**SMALL, "model": {**DECODER, "ffn": 29}, "train": {"steps": 20, "global_batch": 8}}
    more = ("checkpoint={interval: 2, export: true}", "train.validate_interval=1")
    for name in ("plain", "mean"):
        (tmp_path / name).mkdir()
    straight = run(write_project(tmp_path / "plain", spec), 1, tmp_path / "one", 6)
    project = write_project(tmp_path / "mean", spec, "optimizer.average_decay=0.9", *more)
    assert run(project, 1, tmp_path / "mean-one", 6) == straight
    run(project, 2, tmp_path / "two", 4)
    assert_close(run(project, 4, tmp_path / "two", 6, "--resume"), straight, 5e-5)
    losses = [validations(tmp_path / name) for name in ("mean-one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    saved = tmp_path / "two/run-001/checkpoints/step_00000006"
    assert validated_again(project, saved, "model") == pytest.approx(losses[1][-1], rel=1e-5)
    assert validated_again(project, saved, "trained") != pytest.approx(losses[1][-1], rel=1e-4)


def validations(out: Path) -> list[float]:
    lines = map(json.loads, (out / "run-001/metrics.jsonl").read_text().splitlines())
    return [line["validation_loss"] for line in lines if "validation_loss" in line]

"""Schedule-free AdamW: its steps, the mean that is validated and stored, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaffold_launch import assert_close, run
from torch.nn import functional

from model_project import built, imported, values, write
from scripts import python
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill.spec import SpecError

SETTINGS = (
    "optimizer={kind: schedule_free, lr: 0.01}",
    "schedule={kind: constant, warmup_steps: 2}",
)
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
BETA1, BETA2, LR = 0.9, 0.95, 0.01


def step(model: Any, optimizer: Any, lr: float) -> dict[str, torch.Tensor]:
    """One step; its gradients."""
    optimizer.zero_grad()
    functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return grads


@pytest.mark.usefixtures("alone")
def test_four_steps_as_the_paper_has_them(tmp_path: Path) -> None:
    """z steps, x is the mean of all z by the squares of their learning rates, gradients are taken
    between both.
    """
    with imported(write(tmp_path, DECODER, *SETTINGS)) as modules:
        model = built(modules)
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
        x = {name: value.double() for name, value in values(model).items()}
        z, squares = dict(x), {name: torch.zeros_like(value) for name, value in x.items()}
        total = 0.0
        for number, lr in enumerate((LR / 2, LR, LR, LR), start=1):
            total += lr**2
            for name, grad in step(model, optimizer, lr).items():
                y = (1 - BETA1) * z[name] + BETA1 * x[name]
                squares[name] = BETA2 * squares[name] + (1 - BETA2) * grad.double() ** 2
                unbiased = squares[name] / (1 - BETA2**number)
                decay = 0.1 if grad.ndim > 1 else 0.0
                z[name] = z[name] - lr * (grad / (unbiased.sqrt() + 1e-8) + decay * y)
                x[name] = (1 - lr**2 / total) * x[name] + lr**2 / total * z[name]
        trained = values(model)
        with modules["average"].averaged(model, optimizer):
            mean = values(model)
        after = values(model)
    for name in x:
        y = (1 - BETA1) * z[name] + BETA1 * x[name]
        torch.testing.assert_close(trained[name].double(), y, rtol=1e-5, atol=2e-6, msg=name)
        torch.testing.assert_close(mean[name].double(), x[name], rtol=1e-5, atol=2e-6, msg=name)
        assert torch.equal(after[name], trained[name]), name
    assert any(not torch.equal(mean[name], trained[name]) for name in x)


@pytest.mark.usefixtures("alone")
def test_a_forward_in_between_leaves_nothing_gathered(tmp_path: Path) -> None:
    """The root stays gathered after a forward: what follows must not compute with the other
    weights.
    """
    with imported(write(tmp_path, DECODER, *SETTINGS)) as modules, torch.no_grad():
        model = built(modules)
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
        with torch.enable_grad():
            for _ in range(3):
                step(model, optimizer, LR)
        before = model(TOKENS)
        with modules["average"].averaged(model, optimizer):
            mean = model(TOKENS)
        assert torch.equal(model(TOKENS), before) and not torch.equal(mean, before)


def test_refused_in_the_spec(tmp_path: Path) -> None:
    for settings, key in (
        (
            (SETTINGS[0],),
            "optimizer.kind schedule_free needs schedule.kind constant, found the default 'cosine'",
        ),
        (
            (SETTINGS[0], "schedule.kind=linear"),
            "schedule.kind must be 'constant' for optimizer.kind schedule_free",
        ),
        ((*SETTINGS, "optimizer.betas=[0, 0.9]"), "optimizer.betas must begin above 0"),
        ((*SETTINGS, "optimizer.momentum=0.9"), "optimizer.momentum"),
    ):
        with pytest.raises(SpecError) as caught:
            write(tmp_path, DECODER, *settings)
        assert key in str(caught.value)


@pytest.mark.launch
def test_one_trajectory_on_any_ranks_and_the_mean_in_checkpoints(tmp_path: Path) -> None:
    """Validation and saves in between change nothing; the exported weights are those that were
    validated.
    """
    spec = {**SMALL, "model": {**DECODER, "ffn": 29}, "train": {"steps": 20, "global_batch": 8}}
    more = ("checkpoint={interval: 2, export: true}", "train.validate_interval=1")
    for name in ("plain", "often"):
        (tmp_path / name).mkdir()
    straight = run(write_project(tmp_path / "plain", spec, *SETTINGS), 1, tmp_path / "one", 6)
    project = write_project(tmp_path / "often", spec, *SETTINGS, *more)
    assert run(project, 1, tmp_path / "often-one", 6) == straight
    assert_close(run(project, 4, tmp_path / "four", 6), straight, 5e-5)
    run(project, 2, tmp_path / "two", 4)
    two = run(project, 2, tmp_path / "two", 6, "--resume")
    assert two == run(project, 2, tmp_path / "two-straight", 6)
    assert_close(two, straight, 5e-5)
    folder = tmp_path / "two/run-001"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    assert validated_again(project, folder / "checkpoints/step_00000006", "model") == pytest.approx(
        validated, rel=1e-5
    )
    assert validated_again(
        project, folder / "checkpoints/step_00000006", "trained"
    ) != pytest.approx(validated, rel=1e-4)


def validated_again(project: Path, checkpoint: Path, part: str) -> float:
    """The loss of the weights under this name, on the samples of the validation."""
    code = f"""
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from pathlib import Path
from train import *
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cpu")
model = build_model(ModelConfig(), build_mesh(device), device, 1)
dcp.load({{{part!r}: model.state_dict()}}, checkpoint_id={str(checkpoint)!r})
config = ModelConfig()
train_data, held_out = load_data(config.sequence_length, config.vocabulary)
loader = GlobalBatches(train_data, 8, 1, 0)
print(validate(model, loader.fixed_batches(held_out, VALIDATE_BATCHES), device))
dist.destroy_process_group()
"""
    return float(python("-c", code, cwd=project).stdout)

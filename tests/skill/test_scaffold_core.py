"""The generated optim.py and distributed.py, imported; and what the loop does with numbers that are
not finite.
"""

import math
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from records import cases
from scripts import TORCHRUN, python
from trees import SMALL, Generate, write_project

SPEC = {**SMALL, "train": {"steps": 100, "global_batch": 8}, "verify": {"reshard_to": [4]}}


@pytest.fixture
def imported(generate: Generate) -> Generate:
    return partial(generate, SPEC)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4)
        self.head.bias.requires_grad_(False)


def rates(module: ModuleType, steps: int) -> list[float]:
    """The learning rate of each optimizer step, as a part of the highest."""
    settings = __import__("settings").Settings()
    optimizer = module.build_optimizer(Net(), settings)
    scheduler = module.build_scheduler(optimizer, settings)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0] / 0.01)
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedules(imported: Generate, kind: str, warmup: int) -> None:
    more = [] if kind == "constant" else ["schedule.min_lr_ratio=0.1"]
    module = imported("optim", f"schedule.kind={kind}", f"schedule.warmup_steps={warmup}", *more)
    found = rates(module, 120)
    assert found[:warmup] == pytest.approx([(step + 1) / 10 for step in range(warmup)])
    assert max(found) == pytest.approx(1.0)
    assert found[100:] == pytest.approx([1.0 if kind == "constant" else 0.1] * 20)
    middle = (warmup + 100) // 2
    wanted = {"constant": 1.0, "wsd": 1.0, "linear": 0.55, "cosine": 0.55}[kind]
    assert found[middle] == pytest.approx(wanted)
    if kind == "wsd":
        assert found[90] == pytest.approx(1.0) and found[95] == pytest.approx(0.55)
    if kind == "cosine":
        quarter = warmup + (100 - warmup) / 4
        wanted = (
            0.1 + 0.9 * (1 + math.cos(math.pi * (round(quarter) - warmup) / (100 - warmup))) / 2
        )
        assert found[round(quarter)] == pytest.approx(wanted)


def names(module: ModuleType, model: nn.Module) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) of each parameter that the optimizer holds."""
    held = {
        id(param): (group["lr"], group["weight_decay"])
        for group in module.build_optimizer(model, __import__("settings").Settings()).param_groups
        for param in group["params"]
    }
    return {name: held[id(param)] for name, param in model.named_parameters() if id(param) in held}


def test_every_trainable_parameter_is_in_one_group(imported: Generate) -> None:
    groups = (
        "optimizer.groups=[{match: norm, lr: 0.5}, {match: 'norm|embedding', weight_decay: 0.25}]"
    )
    assert names(imported("optim", groups), Net()) == {
        "embedding.weight": (0.01, 0.25),
        "norm.weight": (0.5, 0.0),
        "norm.bias": (0.5, 0.0),
        "head.weight": (0.01, 0.1),
    }


@pytest.mark.parametrize("match", ["nothing", "head.bias"])
def test_a_group_without_a_parameter_is_refused(imported: Generate, match: str) -> None:
    module = imported("optim", f"optimizer.groups=[{{match: {match}}}]")
    with pytest.raises(module.SetupError, match=f"optimizer.groups: .*'{match}'"):
        module.build_optimizer(Net(), __import__("settings").Settings())


def test_groups_of_sgd_without_weight_decay(imported: Generate) -> None:
    groups = "optimizer.groups=[{match: head, lr: 1}]"
    found = names(
        imported("optim", "optimizer.kind=sgd", "optimizer.weight_decay=0", groups), Net()
    )
    assert found["head.weight"] == (1.0, 0.0) and found["norm.bias"] == (0.01, 0.0)


MODEL = """\
import torch
from torch import nn

class Block(nn.Linear):
    pass

class Net(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.embedding, self.block, self.calls, self.bad = nn.Embedding(64, 8), Block(8, 64), 0, bad

    def forward(self, tokens):
        self.calls += self.training and torch.is_grad_enabled()
        rank = torch.distributed.get_rank()
        spoilt = rank == 1 and self.calls in self.bad
        return self.block(self.embedding(tokens)) * (float("nan") if spoilt else 1.0)
"""


@pytest.mark.full
@pytest.mark.launch
@cases(
    "policy, bad, status, said",
    (
        "stop",
        [6],
        1,
        "error: step 3: loss nan, gradient norm nan; stopped before the weights changed",
    ),
    ("skip", [6], 0, "step      3  not finite: this update was skipped"),
    ("skip", [*range(6, 99)], 1, "error: 10 updates in a row were not finite"),
)
def test_all_ranks_agree_on_what_is_not_finite(
    tmp_path: Path, policy: str, bad: Any, status: int, said: str
) -> None:
    """Only rank 1 sees it. It calls the model once before the first step, then twice in each."""
    model = {"kind": "import", "import": "own:Net", "shard": ["Block"], "arguments": {"bad": bad}}
    sizes = {"vocabulary": 64, "sequence_length": 16}
    settings = [f"train.on_nonfinite={policy}", "train.micro_batch=2", "train.steps=14"]
    folder = write_project(tmp_path, {**SPEC, "model": {**model, **sizes}}, *settings)
    (folder / "own.py").write_text(MODEL)
    done = python(*TORCHRUN, 2, "train.py", cwd=folder, status=None)
    assert (done.returncode != 0) == (status != 0)
    assert said in done.stdout + done.stderr
    if status == 0:
        assert "step     14  loss" in done.stdout and "step      4  not finite" not in done.stdout


def test_rank_0_first_tells_the_error_of_rank_0(
    imported: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported("distributed")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen_by_others: list[Any] = []

    def gather(problems: list[Any], own: Any) -> None:
        seen_by_others.append(own)
        problems[:] = ["empty file" if own is None else own, None]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(module.SetupError, match="empty file"):
        module.rank_0_first(pytest.fail)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def empty(name: str) -> None:
        raise module.SetupError(f"{name} is empty")

    with pytest.raises(module.SetupError, match=r"a\.txt is empty"):
        module.rank_0_first(empty, "a.txt")
    assert seen_by_others == [None, "a.txt is empty"]
    with pytest.raises(module.SetupError, match=r"'nowhere/a\.txt'"):
        module.rank_0_first(Path("nowhere/a.txt").read_bytes)

"""Frozen parts and LoRA in generated projects: what is trained moves, the rest stays as it was, bit
for bit.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_scaffold_launch import finish, start
from torch.nn import functional

from model_project import built, imported, values, write
from records import cases
from trees import DECODER
from verified_fsdp2.skill.spec import SpecError

LORA = "finetune={kind: lora, rank: 2, dropout: 0.1, targets: [query, feed_forward.up]}"
FREEZE = "finetune={kind: freeze, train: ['^blocks.1', norm]}"
TRAINED: dict[str, Callable[[str], bool]] = {
    LORA: lambda name: ".lora_" in name,
    FREEZE: lambda name: name.startswith("blocks.1") or "norm" in name,
}
NETWORK = """
from torch import nn


class Block(nn.Linear):
    pass


def build():
    return nn.Sequential(nn.Embedding(64, 8), Block(8, 8), nn.Linear(8, 64))
"""
IMPORTED = {"kind": "import", "import": "net:build", "initialize": "rank-0", "shard": ["Block"]}
IMPORTED |= {"vocabulary": 64, "sequence_length": 16}


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("setting", [LORA, FREEZE], ids=["lora", "freeze"])
def test_only_what_is_named_is_trained(tmp_path: Path, setting: str) -> None:
    with imported(write(tmp_path, DECODER, setting)) as modules:
        model = built(modules)
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
        before = values(model)
        train(model, optimizer)
        after = values(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if TRAINED[setting](name)}
    assert {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    } == moved
    assert len(optimizer.state) == len(moved)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "setting", [LORA, "finetune={kind: freeze, train: [blocks.1.attention.q]}"]
)
def test_what_is_frozen_stays_so_where_matrices_are_split(tmp_path: Path, setting: str) -> None:
    """On torch 2.13.0 SequenceParallel makes each parameter of a norm anew, a trained one."""
    worlds = ("verify.nproc=4", "verify.reshard_to=[1]")
    with imported(write(tmp_path, DECODER, setting, "parallel.tp=2", *worlds)) as modules:
        model = built(modules)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    wanted = ".lora_" if setting == LORA else "blocks.1.attention.q"
    assert trained == {name for name, _ in model.named_parameters() if wanted in name} != set()


@pytest.mark.usefixtures("alone")
def test_adapters_do_nothing_at_first(tmp_path: Path) -> None:
    tokens = torch.arange(32).view(2, 16)
    with imported(write(tmp_path / "plain", DECODER)) as modules:
        wanted = built(modules)(tokens)
    with imported(write(tmp_path / "lora", DECODER, LORA)) as modules:
        model = built(modules)
        assert torch.equal(model(tokens), wanted)
        assert all(
            bool(value.any()) == ("lora_B" not in name) for name, value in values(model).items()
        )


@pytest.mark.usefixtures("alone")
@cases(
    "setting, message",
    ("finetune={kind: freeze, train: ['^2', head]}", "finetune.train: no parameter matches 'head'"),
    (
        "finetune={kind: lora, targets: ['0', '2']}",
        "finetune.targets: no linear layer is named '0'",
    ),
)
def test_a_name_that_matches_nothing_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    project = write(tmp_path, IMPORTED, setting)
    (project / "net.py").write_text(NETWORK)
    with (
        imported(project) as modules,
        pytest.raises(modules["distributed"].SetupError, match=f"^{message}$"),
    ):
        built(modules)
    sys.modules.pop("net", None)


@pytest.mark.usefixtures("alone")
def test_a_base_in_bfloat16_is_the_rounded_one(tmp_path: Path) -> None:
    """The same computation in bfloat16, whose weights are then not rounded anew in each step; the
    adapters stay in float32.
    """
    tuned = "finetune={{kind: lora, rank: 2, targets: [query, feed_forward.up], base_dtype: {}}}"
    found = []
    for dtype in ("float32", "bfloat16"):
        settings = [
            tuned.format(dtype),
            "precision.param_dtype=bfloat16",
            "checkpoint.generate=true",
        ]
        with imported(write(tmp_path / dtype, DECODER, *settings)) as modules:
            model = built(modules)
            optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
            before = values(model)
            train(model, optimizer)
            found.append(values(model))
            assert {str(state["exp_avg"].dtype) for state in optimizer.state.values()} == {
                "torch.float32"
            }
            assert [name for name in before if not torch.equal(before[name], found[-1][name])] == [
                name for name in before if ".lora_" in name
            ]
    whole, half = found
    assert {name: value.dtype for name, value in half.items()} == {
        name: torch.float32 if ".lora_" in name else torch.bfloat16 for name in half
    }
    for name, value in half.items():
        assert torch.equal(value, whole[name].to(value.dtype)), name


@pytest.mark.usefixtures("alone")
@cases(
    "settings",
    [
        "finetune={kind: lora, targets: [query], base_dtype: bfloat16}",
        "precision.param_dtype=float32",
    ],
    [
        "finetune={kind: lora, targets: [query], base_dtype: bfloat16}",
        "precision.param_dtype=bfloat16",
        "torch='2.9'",
    ],
)
def test_a_base_in_bfloat16_is_refused(tmp_path: Path, settings: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        write(tmp_path, DECODER, *settings)
    assert [problem.key for problem in caught.value.problems] == ["finetune.base_dtype"]


@pytest.mark.full
@pytest.mark.launch
def test_a_frozen_base_is_bitwise_unchanged_on_two_ranks(tmp_path: Path) -> None:
    """In groups that mix frozen and trained parameters, and in one that is all frozen: the root."""
    project = write(tmp_path, DECODER, LORA, "checkpoint.keep=9")
    shown = finish(
        start(project, 2, tmp_path / "out", "--steps", "4", "--checkpoint-interval", "1")
    )
    first, last = held(tmp_path / "out", 1), held(tmp_path / "out", 4)
    count = sum(parameter.numel() for parameter in first.values())
    assert f"model  {count:,} parameters, " in shown and " of them trained" in shown
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in first if ".lora_" in name}


def held(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "run-001" / "checkpoints" / f"step_{step:08d}"
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    model = {
        name: torch.empty(value.size) for name, value in stored.items() if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(model, checkpoint_id=folder, no_dist=True)
    return model

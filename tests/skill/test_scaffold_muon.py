"""Muon: orthogonal updates of the matrices of the blocks, AdamW for the rest, on any number of
ranks.
"""

from pathlib import Path

import pytest
import torch
from test_scaffold_launch import assert_close, run
from torch.nn import functional

from model_project import built, imported, values, write
from trees import DECODER, SMALL, write_project

EXPERTS = ("model.experts={number: 4, ffn: 10, first_dense: 1}",)
MUON = ("optimizer={kind: muon, lr: 0.01, momentum: 0.9}",)
OWN_MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
"""
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """By torch's own iterations, in float32."""
    x = update.T if len(update) > update.shape[1] else update
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if len(update) > update.shape[1] else x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("experts", [(), ("model.experts={number: 4}",)])
def test_two_steps_of_both_kinds_of_parameters(tmp_path: Path, experts: tuple[str, ...]) -> None:
    """The matrices of several experts in one parameter are matrices of their own."""
    with imported(write(tmp_path, DECODER, *MUON, *experts)) as modules:
        model = built(modules)
        wanted = {name: torch.nn.Parameter(value) for name, value in values(model).items()}
        momenta = {name: torch.zeros_like(value) for name, value in wanted.items()}
        rest = [value for name, value in wanted.items() if "blocks" not in name or value.ndim < 2]
        decay = [{"params": [one], "weight_decay": 0.1 if one.ndim > 1 else 0.0} for one in rest]
        adamw = torch.optim.AdamW(decay, lr=0.01, betas=(0.9, 0.95))
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
        for _ in range(2):
            optimizer.zero_grad()
            functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
            for name, parameter in model.named_parameters():
                own = wanted[name]
                own.grad = parameter.grad.full_tensor()
                if "blocks" in name and own.ndim == 2:
                    momenta[name] = 0.9 * momenta[name] + 0.1 * own.grad
                    update = 0.1 * own.grad + 0.9 * momenta[name]
                    parts = update.chunk(4 if "stacked" in name else 1)
                    scale = 0.01 * 0.2 * max(parts[0].shape) ** 0.5
                    update = torch.cat([orthogonal(part) for part in parts])
                    own.data = own.data * (1 - 0.01 * 0.1) - scale * update
            adamw.step()
            optimizer.step()
        found = values(model)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.data, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.usefixtures("alone")
def test_matrices_of_the_blocks_of_a_model_of_ones_own(tmp_path: Path) -> None:
    own = {"kind": "import", "import": "own:Net", "shard": ["Block"], "initialize": "rank-0"}
    project = write(tmp_path, {**own, "vocabulary": 16, "sequence_length": 8}, *MUON)
    (project / "own.py").write_text(OWN_MODEL, encoding="utf-8")
    with imported(project) as modules:
        model = built(modules)
        optimizer = modules["optim"].build_optimizer(model, __import__("settings").Settings())
    names = {param: name for name, param in model.named_parameters()}
    found = {
        names[param]
        for group in optimizer.param_groups
        if group["muon"]
        for param in group["params"]
    }
    assert found == {"blocks.0.inner.weight", "blocks.1.inner.weight"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shape", [(8, 8), (5, 32), (32, 5)])
def test_singular_values_come_near_one(tmp_path: Path, shape: tuple[int, int]) -> None:
    with imported(write(tmp_path, DECODER, *MUON)) as modules:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        found = torch.linalg.svdvals(modules["muon"].orthogonalize(matrix))
        assert found.min() > 0.5 and found.max() < 1.5
        assert not modules["muon"].orthogonalize(torch.zeros(shape)).any()


@pytest.mark.full
@pytest.mark.launch
@pytest.mark.parametrize("settings", [("parallel.tp=2",), EXPERTS])
def test_of_split_matrices_and_of_experts(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """A part of 29 rows or columns on 2 x 2 ranks; 3 ranks have rows of several experts."""
    spec = {**SMALL, "model": {**DECODER, "ffn": 58}, "train": {"steps": 20, "global_batch": 12}}
    worlds = ("verify.nproc=4", "verify.reshard_to=[1]")
    project = write_project(tmp_path, spec, *MUON, *worlds, *settings)
    straight = run(project, 1, tmp_path / "one", 4)
    ranks = 3 if settings == EXPERTS else 4
    run(project, ranks, tmp_path / "several", 2)
    assert_close(run(project, 1, tmp_path / "several", 4, "--resume"), straight, 5e-5)


@pytest.mark.launch
def test_the_same_losses_on_other_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """29 rows do not divide by 2 ranks."""
    spec = {**SMALL, "model": {**DECODER, "ffn": 29}, "train": {"steps": 20, "global_batch": 8}}
    project = write_project(tmp_path, spec, *MUON)
    straight = run(project, 1, tmp_path / "one", 4)
    run(project, 2, tmp_path / "two", 2)
    assert_close(run(project, 1, tmp_path / "two", 4, "--resume"), straight, 5e-5)

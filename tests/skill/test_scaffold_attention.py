"""Normalised queries and keys, and windows of attention in the decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaffold_launch import assert_close, run
from torch.nn import functional

from model_project import built, imported, write
from records import cases
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill.spec import SpecError, load

NEAR, FAR, NORMED = "model.window=3", "model.full_attention_every=2", "model.qk_norm=true"
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
DOCUMENTS = [
    "data={kind: jsonl, files: ['*.jsonl'], packing: documents, too_long: drop}",
    "model.vocabulary=256",
]


def reach(model: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Which token has changed which logits: [changed, seen], of the first row."""
    model.requires_grad_(False)
    wanted, rows = model(*inputs), []
    for number in range(inputs[0].shape[1]):
        other = inputs[0].clone()
        other[0, number] = (other[0, number] + 1) % 64
        rows.append((model(other, *inputs[1:])[0] != wanted[0]).any(-1))
    return torch.stack(rows)


def band(size: int, wide: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu().tril(wide)


@pytest.mark.usefixtures("alone")
@cases(
    "layers, settings, wide",
    (1, [NEAR], 2),
    (2, [NEAR], 4),  # what a token sees has seen as many
    (2, [NEAR, FAR], 15),
    (1, ["model.window=1"], 0),
    (1, [], 15),
)
def test_which_tokens_are_seen(tmp_path: Path, layers: int, settings: list[str], wide: int) -> None:
    with imported(write(tmp_path, {**DECODER, "layers": layers}, *settings)) as modules:
        assert torch.equal(reach(built(modules), TOKENS), band(16, wide))


@pytest.mark.usefixtures("alone")
@cases("settings, wide", ([NEAR], 4), ([NEAR, FAR], 15))
def test_a_window_ends_with_its_document(tmp_path: Path, settings: list[str], wide: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 60)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, 16)
    with imported(write(tmp_path, DECODER, *DOCUMENTS, *settings)) as modules:
        found = reach(built(modules), TOKENS, positions)
    assert torch.equal(found, torch.block_diag(band(9, wide), band(7, wide)).bool())


@pytest.mark.usefixtures("alone")
def test_queries_and_keys_are_normalised_in_each_head(tmp_path: Path) -> None:
    with imported(write(tmp_path, {**DECODER, "kv_heads": 1}, NORMED)) as modules:
        model = built(modules)
        spec = load(tmp_path / "spec.yaml", [NORMED])
        assert sum(p.numel() for p in model.parameters()) == spec.parameters
        part = modules["model"].Attention(model.config)
        x, rope, heads = (
            torch.randn(2, 16, 32),
            model.rope,
            lambda y: y.unflatten(-1, (-1, 16)).transpose(1, 2),
        )
        q, k, v = (heads(x @ layer.weight.T) for layer in (part.query, part.key, part.value))
        rotate = modules["model"].rotate
        q, k = (rotate(functional.rms_norm(one, (16,), eps=1e-5), rope) for one in (q, k))
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(band(16, 15).T.logical_not(), -torch.inf)
        wanted = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ part.output.weight.T
        torch.testing.assert_close(part(x, rope), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.launch
def test_the_same_losses_with_tensor_parallelism(tmp_path: Path) -> None:
    spec = {
        **SMALL,
        "train": {"steps": 20, "global_batch": 8},
        "verify": {"nproc": 2, "reshard_to": [4]},
    }
    project = write_project(tmp_path, spec, NEAR, FAR, NORMED, "parallel.tp=2")
    straight = run(project, 1, tmp_path / "one", 4)
    assert_close(run(project, 2, tmp_path / "two", 4), straight, 5e-5)


@cases(
    "settings, key",
    (["model.window=0"], "model.window"),
    (["model.window=-3"], "model.window"),
    (["model.window=16"], "model.window"),
    ([FAR], "model.full_attention_every"),
    ([NEAR, "model.full_attention_every=1"], "model.full_attention_every"),
    ([NEAR, "model.full_attention_every=3"], "model.full_attention_every"),
    (["model.qk_norm=1"], "model.qk_norm"),
    (
        [
            "model={kind: import, import: 'a:b', shard: [B], vocabulary: 64, sequence_length: 16}",
            NEAR,
        ],
        "model.window",
    ),
)
def test_what_is_refused(tmp_path: Path, settings: list[str], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        write(tmp_path, DECODER, *settings)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert not (tmp_path / "project").exists()


def test_the_small_model_of_a_verification_has_a_window_too(tmp_path: Path) -> None:
    small = "verify.model={layers: 2, width: 64, vocabulary: 64, sequence_length: 16}"
    project = write(
        tmp_path,
        {"kind": "decoder", "preset": "1b"},
        small,
        "model.window=512",
        "model.full_attention_every=8",
    )
    assert "    window=8,\n    full_attention_every=2,\n" in (project / "model.py").read_text()

"""Documents side by side in a sample: losses and gradients are those of each document alone."""

from __future__ import annotations

import importlib
import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_project import DECODER, Project

JSONL = {"kind": "jsonl", "files": ["notes.jsonl"], "validation_fraction": 0.1, "separator": ""}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 64


@pytest.fixture
def texts(project: Project) -> list[str]:
    chance = random.Random(0)
    found = ["".join(chance.choices("abcdef ", k=chance.randint(1, 65))) for _ in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
    (project.folder / "notes.jsonl").write_text(lines)
    return [text for text in found if len(text) > 1]


def samples(project: Project, model: dict[str, Any], packing: object) -> list[tuple[Tensor, ...]]:
    data = project.load({**JSONL, "packing": packing}, model)
    project.prepare()
    return [part[n] for part in data.load_data(LENGTH) for n in range(len(part))]


def gradients(
    model: nn.Module, batches: list[tuple[Tensor, ...]], masked: bool
) -> tuple[float, list[Tensor]]:
    """Summed loss and its gradients, with the call of the generated train.py."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs, targets, *positions = (part[None] for part in batch)
        logits = model(inputs, *positions) if masked else model(inputs)
        loss = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(first: tuple[float, list[Tensor]], second: tuple[float, list[Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    largest = max(gradient.abs().max() for gradient in first[1])
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(largest))


def test_every_document_is_in_one_sample_whole(project: Project, texts: list[str]) -> None:
    """In their order, as many as there is room for, each with positions that start at 0."""
    model = {**DECODER, "sequence_length": LENGTH}
    found, room = [], 0
    for inputs, targets, positions in samples(project, model, "documents"):
        filled = int((inputs != 0).sum())
        bounds = [*np.flatnonzero((positions == 0) & (inputs != 0)).tolist(), filled]
        documents = [
            bytes([*inputs[a:b].tolist(), int(targets[b - 1])]).decode()
            for a, b in pairwise(bounds)
        ]
        assert len(documents[0]) - 1 > room  # it had none in the sample before
        assert all(positions[a:b].tolist() == list(range(b - a)) for a, b in pairwise(bounds))
        assert (targets[filled:] == -100).all()
        room = LENGTH - filled
        found += documents
    assert found == texts


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_decoder_computes_what_it_does_unpacked(
    project: Project, texts: list[str], kv_heads: int
) -> None:
    config = {**DECODER, "layers": 2, "heads": 4, "kv_heads": kv_heads, "sequence_length": LENGTH}
    results = []
    for packing in (False, "documents"):
        batches = samples(project, config, packing)
        module = importlib.import_module("model")
        torch.manual_seed(0)
        model = module.Decoder(module.ModelConfig())
        for name, parameter in sorted(model.named_parameters()):
            nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        results.append(gradients(model, batches, packing == "documents"))
    same(*results)


def test_transformers_model_computes_what_it_does_unpacked(
    project: Project, texts: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"kind": "transformers", "config": LLAMA, "vocabulary": 256, "sequence_length": LENGTH}
    results = []
    for packing in (False, "documents"):
        batches = samples(project, config, packing)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**LLAMA)
        )

        class Logits(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
                found: Tensor = self.inner(inputs, position_ids=positions, use_cache=False).logits
                return found

        results.append(gradients(Logits(model), batches, packing == "documents"))
    assert (
        "position_ids=positions, use_cache=False"
        in (project.folder / "project" / "train.py").read_text()
    )
    same(*results)


def test_block_mask_of_flex_attention_is_the_mask_of_the_cpu(
    project: Project, texts: list[str]
) -> None:
    """FlexAttention, not compiled here, on the same function of positions."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batches = samples(project, {**DECODER, "sequence_length": LENGTH}, "documents")
    model = importlib.import_module("model")
    positions = torch.stack([batch[2] for batch in batches[:3]])
    mask = model.document_mask(positions)
    documents = (positions == 0).cumsum(-1)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    blocks = create_block_mask(attends, 3, None, LENGTH, LENGTH, device="cpu")
    q, k, v = torch.randn(3, 3, 2, LENGTH, 16).unbind(0)
    with pytest.warns(UserWarning):
        flexible = flex_attention(q, k, v, block_mask=blocks)
    assert torch.allclose(flexible, model.attend(q, k, v, mask), atol=1e-5)

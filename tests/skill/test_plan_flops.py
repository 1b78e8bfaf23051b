"""The FLOPs of a plan against a manual count, and its MFU against that of the project."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from records import Patch
from scripts import Command, written
from trees import Generate
from verified_fsdp2.skill.capacity.model_flops import ideal
from verified_fsdp2.skill.spec import load
from verified_fsdp2.verifier.config.devices import device

LAYERS, WIDTH, VOCABULARY, LENGTH = 2, 256, 512, 256
SAMPLES = 8  # of a rank in a step, in two micro-batches
TOKENS = SAMPLES * LENGTH
SPEC = f"""
version: 1
name: one
model: {{kind: decoder, layers: {LAYERS}, width: {WIDTH}, heads: 4,
  vocabulary: {VOCABULARY}, sequence_length: {LENGTH}}}
data: {{kind: synthetic}}
precision: {{param_dtype: bfloat16}}
optimizer: {{lr: 1.0e-3}}
memory: {{activation_checkpointing: full}}
train: {{steps: 20, global_batch: 16, micro_batch: 4, dry_run: false}}
verify: {{reshard_to: [1]}}
"""
EXPERTS, CHOSEN, HIDDEN = 64, 8, 128
MOE = f"model.experts={{number: {EXPERTS}, top_k: {CHOSEN}, ffn: {HIDDEN}, shared: 0}}"
ATTENTION = TOKENS * WIDTH * (8 * WIDTH + 4 * LENGTH)  # four products with weights, two without
HEAD = 2 * TOKENS * WIDTH * VOCABULARY


def planned(command: Command, folder: Path, *changes: str) -> dict[str, Any]:
    """The plan of the spec with these changes."""
    path = written(folder, SPEC, "spec.yaml")
    keys = [word for change in changes for word in ("--set", change)]
    words = ("--nproc", 2, "--gpu", "h100", "--steps", 2, "--json", *keys)
    return dict(command("plan", path, *words, code=0).data)


def summed(found: dict[str, dict[str, Any]], part: str = "") -> tuple[int, int, int]:
    """(forward, backward, recomputed) of the modules whose name has `part`."""
    ones = [one for name, one in found.items() if part in name]
    forward, backward, again = (
        sum(one[key] for one in ones) for key in ("forward", "backward", "recompute")
    )
    return forward, backward, again


@pytest.mark.launch
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_routed_experts_cost_their_products(tmp_path: Path, command: Command, dtype: str) -> None:
    """All at once in bfloat16, one by one in float32; the rows of all experts are known, not those
    of one.
    """
    found = planned(command, tmp_path, MOE, f"precision.param_dtype={dtype}")["rehearsal"]["flops"]
    experts = LAYERS * 3 * 2 * TOKENS * CHOSEN * WIDTH * HIDDEN
    assert summed(found, "experts.stacked") == (experts, 3 * experts, experts)
    layers = experts + LAYERS * (ATTENTION + 2 * TOKENS * WIDTH * EXPERTS)
    forward, backward, again = summed(found)
    assert forward == pytest.approx(layers + HEAD, rel=0.05)
    assert again == pytest.approx(layers, rel=0.05)
    assert backward == pytest.approx(3 * layers + 2 * HEAD, rel=0.05)


@pytest.mark.launch
@pytest.mark.parametrize(
    "change, blocks",
    [
        ("parallel.cp=2", 2 * 18),  # rank 0 has the first two rows of blocks and the last two
        pytest.param("model.window=128", 15, marks=pytest.mark.full),
    ],
)
def test_attention_costs_the_blocks_that_its_mask_leaves(
    tmp_path: Path, command: Command, change: str, blocks: float
) -> None:
    length = 1024  # 8 x 8 blocks
    plan = planned(command, tmp_path, change, f"model.sequence_length={length}")
    found = plan["rehearsal"]["flops"]
    forward = 4 * SAMPLES * length * WIDTH * length * blocks / 64
    assert found["blocks.0.attention"]["forward"] == pytest.approx(forward, rel=0.01)
    assert found["blocks.0.attention"]["recompute"] == pytest.approx(forward, rel=0.01)
    assert plan["bound"]["mfu"] < 1


@pytest.mark.launch
def test_chunks_of_a_loss_cost_what_the_whole_does(tmp_path: Path, command: Command) -> None:
    """They write the gradients in place, in the forward."""
    plan = planned(command, tmp_path, "memory.chunked_loss=true")
    found = plan["rehearsal"]["flops"]
    layers = summed(found, "blocks.")
    forward, backward, _ = summed(found)
    assert forward - layers[0] == pytest.approx(3 * HEAD, rel=0.01)
    assert backward == layers[1]
    assert plan["rehearsal"]["parameters"] == load(tmp_path / "spec.yaml").parameters
    assert plan["bound"]["mfu_counts"].startswith("6N + 12LHQT")
    assert 0 < plan["bound"]["mfu"] < 1


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.tied_embeddings=false", "model.kv_heads=2"),
        (f"{MOE[:-1]}, first_dense: 1}}", "model.tied_embeddings=false"),
        ("operation.peak_tflops=500",),
    ],
)
def test_a_plan_counts_what_the_project_does(
    tmp_path: Path, generate: Generate, monkeypatch: Patch, changes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    keys = ("operation.mfu=true", *changes)
    flops = generate(yaml.safe_load(SPEC), "flops", *keys)
    from model import Decoder, ModelConfig  # type: ignore[import-not-found]

    with torch.device("meta"):
        model = Decoder(ModelConfig())
    spec = load(written(tmp_path, SPEC, "of-the-plan.yaml"), keys)
    found = ideal(spec, sum(one.numel() for one in model.parameters()), 2, device("h100"))
    assert found is not None and found.counts.startswith("6N + 12LHQT")
    assert found.seconds == pytest.approx(flops.ideal_seconds(model, 16), rel=1e-3)

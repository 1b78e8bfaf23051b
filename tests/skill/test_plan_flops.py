"""The FLOPs of a plan against a count by hand."""

from pathlib import Path
from typing import Any

import pytest

from scripts import Command, written

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


def counted(command: Command, folder: Path, *changes: str) -> dict[str, dict[str, Any]]:
    """The FLOPs of the plan of the spec with these changes, by module."""
    path = written(folder, SPEC, "spec.yaml")
    keys = [word for change in changes for word in ("--set", change)]
    done = command("plan", path, "--nproc", 2, "--steps", 2, "--json", *keys, code=0)
    return dict(done.data["rehearsal"]["flops"])


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
    found = counted(command, tmp_path, MOE, f"precision.param_dtype={dtype}")
    experts = LAYERS * 3 * 2 * TOKENS * CHOSEN * WIDTH * HIDDEN
    assert summed(found, "experts.stacked") == (experts, 3 * experts, experts)
    layers = experts + LAYERS * (ATTENTION + 2 * TOKENS * WIDTH * EXPERTS)
    forward, backward, again = summed(found)
    assert forward == pytest.approx(layers + HEAD, rel=0.05)
    assert again == pytest.approx(layers, rel=0.05)
    assert backward == pytest.approx(3 * layers + 2 * HEAD, rel=0.05)


@pytest.mark.launch
def test_chunks_of_a_loss_cost_what_the_whole_does(tmp_path: Path, command: Command) -> None:
    """They write the gradients in place, in the forward."""
    found = counted(command, tmp_path, "memory.chunked_loss=true")
    layers = summed(found, "blocks.")
    forward, backward, _ = summed(found)
    assert forward - layers[0] == pytest.approx(3 * HEAD, rel=0.01)
    assert backward == layers[1]

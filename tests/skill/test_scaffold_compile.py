"""Compiled blocks: their gradients are those of eager blocks, whatever else the project does, and
they are compiled indeed.
"""

import json
from pathlib import Path

import pytest

from scripts import TORCHRUN, python
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import SpecError, load

MODEL = {**DECODER, "layers": 3, "heads": 4, "kv_heads": 2, "tied_embeddings": False}
SPEC = {**SMALL, "model": MODEL, "train": {"steps": 20, "global_batch": 8}}
EXPERTS = "model.experts={number: 4, top_k: 2, first_dense: 1, shared: 1}"
TP, EP, BF16 = "parallel.tp=2", "parallel.ep=2", "precision.param_dtype=bfloat16"
FULL, SELECTIVE = (f"memory.activation_checkpointing={kind}" for kind in ("full", "op-selective"))
VARIANTS = {  # settings, and how many graphs the equal blocks, or their equal parts, share
    "full": ([FULL], 1),
    "tp": ([TP], 1),
    "tp, full": ([TP, FULL, "model.tied_embeddings=true"], 1),
    "ep, full": ([EP, FULL, EXPERTS], 3),
    "ep, op-selective": ([EP, SELECTIVE, BF16, EXPERTS], 4),
}


@pytest.mark.full
@pytest.mark.launch
def test_gradients_on_two_ranks(tmp_path: Path) -> None:
    folders = []
    for number, (settings, _) in enumerate(VARIANTS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        folders.append(write_project(folder, SPEC, "memory.compile=true", *settings))
    script = Path(__file__).with_name("compiled_world.py")
    done = python(*TORCHRUN, 2, script, *folders, timeout=900)
    found = dict(zip(VARIANTS, json.loads(done.stdout), strict=True))
    exact = {"zero": [], "apart": 0.0, "breaks": 0}
    for name, (_, graphs) in VARIANTS.items():
        assert 0 < found[name].pop("graphs") <= graphs, name
        assert found[name] == exact, name


def test_experts_of_other_ranks_are_not_compiled(tmp_path: Path) -> None:
    """Their ranks wait for each other, and FSDP gathers them by themselves."""
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    texts = scaffold.render(load(tmp_path / "spec.yaml", ["memory.compile=true", EXPERTS, EP]))
    assert "kinds = Attention | FeedForward\n" in texts["model.py"]
    assert "block.compile()" not in texts["model.py"]


def test_split_layers_of_transformers_are_not_compiled(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 64, "num_attention_heads": 2}
    model = {"kind": "transformers", "config": config, "vocabulary": 64, "sequence_length": 16}
    (tmp_path / "spec.yaml").write_text(json.dumps({**SPEC, "model": model}))
    load(tmp_path / "spec.yaml", ["memory.compile=true"])
    with pytest.raises(SpecError, match=r"memory\.compile must be false"):
        load(tmp_path / "spec.yaml", ["memory.compile=true", TP])

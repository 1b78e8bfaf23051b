"""Context parallelism with what else a spec may ask for: the losses and gradient norms of one
process that has whole sequences.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_scaffold_launch import assert_close, run

from model_project import imported, write
from records import cases
from scripts import python
from trees import DECODER, SMALL, write_project

CP = ["parallel.cp=2", "verify.reshard_to=[1]"]
SPEC = {**SMALL, "train": {"steps": 20, "global_batch": 8, "max_norm": 0.5}}
EXPERTS = "model.experts={number: 4, top_k: 2, first_dense: 1, balance_rate: 0.1}"
NEAR, FAR = "model.window=5", "model.full_attention_every=2"
DOCUMENTS = [
    "data={kind: jsonl, files: ['*.jsonl'], packing: documents, too_long: drop}",
    "model.vocabulary=256",
]
LENGTH = 16


@pytest.fixture
def texts(tmp_path: Path) -> None:
    chance = random.Random(0)
    found = ["".join(chance.choices("abcdef ", k=chance.randint(2, LENGTH))) for _ in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
    (tmp_path / "notes.jsonl").write_text(lines)


@pytest.mark.usefixtures("alone", "texts")
@cases(
    "settings, name, window",
    ([], "causal_mask", ()),
    ([NEAR], "window_mask", (5,)),
    (DOCUMENTS, "document_mask", ()),
    ([*DOCUMENTS, NEAR, FAR], "document_mask", (5,)),
)
def test_each_rank_attends_to_what_one_process_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    name: str,
    window: tuple[int, ...],
) -> None:
    """Also by FlexAttention's mask, not compiled here."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    given = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, LENGTH)
    place = torch.arange(LENGTH)
    back = place[:, None] - place
    wanted = (back >= 0) & (back < (window or (LENGTH,))[0])
    if "document" in name:
        wanted &= (place[:, None] < 9) == (place < 9)
    with imported(write(tmp_path, DECODER, *CP, *settings)) as modules:
        model, parallel = modules["model"], modules["context_parallel"]
        seen = []
        for part in range(3):
            monkeypatch.setattr(parallel, "sequence_part", lambda part=part: (part, 3))
            found = getattr(model, name)(given, *window)
            rows, columns = (
                part(place[None])[0] for part in (parallel.own_part, parallel.all_parts)
            )
            found = found.expand(2, 1, len(rows), LENGTH)[1, 0]
            assert torch.equal(found, wanted[rows][:, columns])
            seen += rows.tolist()
            monkeypatch.setattr(model, "compiled", lambda function: function)
            like = SimpleNamespace(shape=(1, LENGTH), device="cpu", is_cuda=True)
            blocks = model.build_mask(lambda b, h, q, k: q - k < 5, like)
            dense = flex.create_mask(blocks.mask_mod, 1, 1, *blocks.seq_lengths, device="cpu")
            assert torch.equal(dense[0, 0], (back < 5)[rows][:, columns])
        assert sorted(seen) == place.tolist()


@pytest.mark.launch
@pytest.mark.usefixtures("texts")
def test_one_trajectory_on_1_2_and_4_ranks_and_after_resumes_without_it(tmp_path: Path) -> None:
    """A pair shares each sequence; of 4 ranks, two pairs that have a copy of the model each."""
    together = [
        *DOCUMENTS,
        NEAR,
        FAR,
        EXPERTS,
        "memory.chunked_loss=true",
        "memory.activation_checkpointing=op-selective",
        "checkpoint.generate=true",
    ]
    projects = []
    for number, settings in enumerate(([], CP, [*CP, "parallel.dp_replicate=2"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "notes.jsonl").symlink_to(tmp_path / "notes.jsonl")
        projects.append(write_project(folder, SPEC, *together, *settings))
        python("prepare.py", cwd=projects[-1])
    whole, split, copies = projects
    wanted, out = run(whole, 1, tmp_path / "whole-1", 4), tmp_path / "out"
    run(split, 2, out, 2)
    assert_close(run(copies, 4, out, 3, "--resume"), wanted[:3], 5e-5)
    assert_close(run(whole, 1, out, 4, "--resume"), wanted, 5e-5)
    assert_close(run(split, 1, tmp_path / "split-1", 4), wanted, 5e-5)
    checkpoint = out / "run-001" / "checkpoints" / "step_00000003"
    prompt = (checkpoint, "ab", "--tokens", 20)
    said = [python("generate.py", *prompt, cwd=project).stdout for project in (whole, split)]
    assert said[0] == said[1] != ""


@pytest.mark.full
@pytest.mark.launch
@cases(
    "settings",
    ["optimizer={kind: muon, lr: 0.01}", "parallel.reshard_after_forward=2"],
    ["optimizer.kind=adamw8bit", "parallel.dp_replicate=2"],
    ["finetune={kind: lora, targets: [query, value]}", "parallel.cpu_offload=true"],
    ["finetune={kind: freeze, train: [attention]}", "model.tied_embeddings=false"],
    [EXPERTS, "parallel.ep=2", "model.kv_heads=1"],
    [EXPERTS, "parallel.ep=4", "memory.chunked_loss=true", "model.tied_embeddings=false"],
)
def test_with_other_settings(tmp_path: Path, settings: list[str]) -> None:
    project = write_project(tmp_path, SPEC, *CP, "verify.nproc=4", *settings)
    assert_close(run(project, 4, tmp_path / "four", 3), run(project, 1, tmp_path / "one", 3), 5e-5)

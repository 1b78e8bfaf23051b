"""Expert parallelism: tokens go to the ranks of their experts and back, and the losses are those of
one process.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from test_scaffold_launch import assert_close, run
from torch.distributed.fsdp import FSDPModule

from model_project import built, imported, write
from records import cases
from scripts import python
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import SpecError, load

EXPERTS = "model.experts={number: 4, top_k: 2, first_dense: 1, balance_rate: 0.1}"
EP = [EXPERTS, "parallel.ep=2", "verify.nproc=4", "verify.reshard_to=[1]"]
SPEC = {**SMALL, "train": {"steps": 20, "global_batch": 8}}
# a gradient of another scale gives other weights
SGD = "optimizer={kind: sgd, lr: 0.1, weight_decay: 0}"


@pytest.mark.launch
def test_one_trajectory_on_1_2_and_4_ranks_and_after_resumes_without_it(tmp_path: Path) -> None:
    """2 ranks share the experts; of 4, two pairs do, and two ranks share the rows of each.

    The gradient norm counts too.
    """
    split, whole = tmp_path / "split", tmp_path / "whole"
    for folder, settings in ((split, EP), (whole, [EXPERTS])):
        folder.mkdir()
        write_project(folder, SPEC, SGD, *settings)
    split, whole = split / "project", whole / "project"
    wanted = run(whole, 1, tmp_path / "whole-1", 4)
    run(split, 4, tmp_path / "resumed", 2)
    assert_close(run(split, 2, tmp_path / "resumed", 3, "--resume"), wanted[:3], 5e-5)
    assert_close(run(whole, 1, tmp_path / "resumed", 4, "--resume"), wanted, 5e-5)
    assert_close(run(split, 1, tmp_path / "split-1", 4), wanted, 5e-5)


@pytest.mark.full
@pytest.mark.launch
def test_one_trajectory_beside_split_matrices(tmp_path: Path) -> None:
    """Each rank of tp routes its part of the sequence; all ranks share the experts, or pairs do.

    The gradient norm counts too, and a gradient of another scale gives other weights.
    """
    tp, whole = ["parallel.tp=2", "verify.nproc=4", "verify.reshard_to=[1]"], tmp_path / "whole"
    for name, settings in (
        ("whole", []),
        ("all", [*tp, "parallel.ep=4"]),
        ("two", [*tp, "parallel.ep=2"]),
    ):
        (tmp_path / name).mkdir()
        write_project(tmp_path / name, SPEC, SGD, EXPERTS, *settings)
    wanted = run(whole / "project", 1, tmp_path / "whole-1", 3)
    for name, ranks in (("all", 4), ("all", 1), ("two", 4)):
        found = run(tmp_path / name / "project", ranks, tmp_path / f"{name}-{ranks}", 3)
        assert_close(found, wanted, 5e-5)


@pytest.mark.full
@pytest.mark.launch
@cases(
    "settings",
    ["parallel.dp_replicate=2", "memory.activation_checkpointing=full"],
    ["memory.activation_checkpointing=op-selective"],
    ["train.micro_batch=2", "checkpoint.mode=thread", "memory.activation_checkpointing=full"],
    ["train.max_norm=null", "memory.chunked_loss=true", "parallel.reshard_after_forward=false"],
    ["optimizer={kind: schedule_free, lr: 0.01}", "schedule.kind=constant"],
    [
        "optimizer.groups=[{match: stacked, lr: 0.001}]",
        "parallel.prefetch={forward: 2, backward: 2}",
    ],
    ["parallel.cpu_offload=true", "finetune={kind: lora, targets: [query, gate]}"],
    ["parallel.cpu_offload=true", "finetune={kind: freeze, train: [experts, norm]}"],
    ["parallel.tp=2", "model.qk_norm=true", "memory.chunked_loss=true"],
    ["parallel.tp=2", "parallel.dp_replicate=2", "model.tied_embeddings=false"],
    ["parallel.tp=2", "optimizer={kind: muon, lr: 0.01}", "parallel.cpu_offload=true"],
    ["optimizer={kind: muon, lr: 0.01}", "parallel.dp_replicate=2"],
    ["optimizer={kind: adamw8bit, lr: 0.01}", "model.width=64", "model.heads=4"],
)
def test_with_other_settings(tmp_path: Path, settings: list[str]) -> None:
    project = write_project(tmp_path, SPEC, *EP, *settings)
    assert_close(run(project, 4, tmp_path / "four", 3), run(project, 1, tmp_path / "one", 3), 5e-5)


@cases(
    "settings, key, message",
    (["parallel.ep=2"], "parallel.ep", "must be 1 without model.experts, found 2"),
    ([EXPERTS, "parallel.ep=3"], "parallel.ep", "must divide model.experts.number 4, found 3"),
    (
        [EXPERTS, "parallel.ep=4", "parallel.dp_shard=2", "verify.reshard_to=[1]"],
        "parallel.ep",
        "must divide parallel.dp_shard 2, found 4",
    ),
    (
        [EXPERTS, "parallel.ep=2", "parallel.dp_replicate=2", "verify.reshard_to=[1]"],
        "parallel.ep",
        "is not verified on the mesh 2 x 1, which shards over 1 rank; set verify.nproc 4",
    ),
    (
        [EXPERTS, "parallel.ep=2", "train.global_batch=12", "verify={nproc: 3, reshard_to: [1]}"],
        "parallel.ep",
        (
            "must divide the 3 ranks that share a copy of the model on 3 ranks, and"
            " model.experts.number, found 2"
        ),
    ),
    (
        [EXPERTS, "parallel={tp: 2, dp_shard: 1, ep: 4}", "verify.reshard_to=[1]"],
        "parallel.ep",
        "must divide parallel.dp_shard 1 x tp 2, found 4",
    ),
    (
        [
            "model.experts={number: 4, ffn: 33}",
            "parallel.tp=2",
            "parallel.ep=2",
            "verify.reshard_to=[1]",
        ],
        "parallel.tp",
        "must divide model.experts.ffn x shared 33, found 2",
    ),
    (
        [*EP, "parallel.reshard_after_forward=2"],
        "parallel.reshard_after_forward",
        "must be true or false with parallel.ep 2, found 2",
    ),
)
def test_what_is_refused(tmp_path: Path, settings: list[str], key: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        write(tmp_path, DECODER, *settings)
    found = [(problem.key, message in problem.message) for problem in caught.value.problems]
    assert (key, True) in found, caught.value.problems


def test_the_groups_of_the_experts_are_gathered_ahead(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, with `ep`: for the host waits in each layer."""
    calls: dict[str, list[tuple[Any, list[Any]]]] = {"forward": [], "backward": []}
    for way, found in calls.items():
        monkeypatch.setattr(
            FSDPModule,
            f"set_modules_to_{way}_prefetch",
            lambda module, ahead, found=found: found.append((module, ahead)),
        )
    with imported(write(tmp_path, {**DECODER, "layers": 3}, *EP)) as modules:
        model = built(modules)
    dense, first, last = model.blocks
    assert calls["forward"] == [
        (model, [dense]),
        (dense, [first, first.experts.stacked]),
        (first, [last, last.experts.stacked]),
        (last, []),
    ]
    assert calls["backward"] == [
        (model, [last, last.experts.stacked]),
        (last, [first, first.experts.stacked]),
        (first, [dense]),
        (dense, []),
    ]


@pytest.mark.launch
def test_one_process_generates_with_all_experts(tmp_path: Path) -> None:
    project = write_project(tmp_path, SPEC, *EP, "parallel.tp=2", "checkpoint.generate=true")
    run(project, 2, tmp_path / "out", 1)
    (checkpoint,) = tmp_path.glob("out/run-001/checkpoints/step_*")
    done = python("generate.py", checkpoint, "5 6 7", "--tokens", 4, cwd=project)
    assert len(done.stdout.split()) == 7


def test_a_project_without_it_has_no_trace_of_it(tmp_path: Path) -> None:
    write(tmp_path, DECODER, EXPERTS)
    texts = scaffold.render(load(tmp_path / "spec.yaml", [EXPERTS]))
    assert "expert_parallel.py" not in texts
    assert "expert_parallel.py" in scaffold.render(load(tmp_path / "spec.yaml", EP))
    traces = [
        path
        for path, text in texts.items()
        if path.endswith(".py") and re.search(r"\bep\b|expert_par|EP\b", text)
    ]
    assert traces == []

"""Expert parallelism: tokens go to the ranks of their experts and back, and the losses are those of
one process.
"""

import re
from pathlib import Path

import pytest
from test_scaffold_launch import assert_close, run

from model_project import write
from records import cases
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
@cases(
    "settings",
    ["parallel.dp_replicate=2", "memory.activation_checkpointing=full"],
    ["memory.activation_checkpointing=op-selective"],
    ["train.micro_batch=2", "checkpoint.mode=thread", "memory.activation_checkpointing=full"],
    ["train.max_norm=null", "memory.chunked_loss=true", "parallel.reshard_after_forward=false"],
    ["optimizer={kind: schedule_free, lr: 0.01}", "schedule.kind=constant"],
    [
        "optimizer.groups=[{match: stacked, lr: 0.001}]",
        "parallel.prefetch={forward: 1, backward: 1}",
    ],
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
        [*EP, "parallel.cpu_offload=true"],
        "parallel.cpu_offload",
        "must be false with parallel.ep 2, found true",
    ),
    (
        [*EP, "checkpoint.generate=true"],
        "checkpoint.generate",
        "must be false with parallel.ep 2, found true",
    ),
    (
        [*EP, "finetune={kind: lora, targets: [query]}"],
        "finetune.kind",
        "must be full with parallel.ep 2",
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

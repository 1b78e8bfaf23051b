"""A mesh of production, and the smaller one of the same shape on which its project is verified;
projects without their data.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_scaffold_launch import assert_close, finish, run, start, steps_of

from scripts import Command, forked, python
from trees import DECODER, SMALL, write_project
from verified_fsdp2.skill.spec import SpecError, load
from verified_fsdp2.skill.spec.meshes import verified

TRAIN = {"steps": 20, "global_batch": 32, "micro_batch": 2}
CLUSTER = {**SMALL, "parallel": {"dp_replicate": 2, "dp_shard": 8}, "train": TRAIN}
NOWHERE = {
    **CLUSTER,
    "model": {**DECODER, "vocabulary": 300},
    "data": {
        "kind": "jsonl",
        "files": ["/nowhere/*.jsonl"],
        "tokenizer": "/nowhere/tokenizer.json",
    },
}


def of(replicate: int | str, shard: int | str, tp: int = 1, cp: int = 1) -> dict[str, Any]:
    return {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "cp": cp}


@pytest.mark.parametrize(
    ("parallel", "nodes", "nproc", "expected"),
    [
        (of(1, "auto"), 0, "auto", (1, 2, 1)),
        (of(1, "auto"), 0, 4, (1, 4, 1)),
        (of(1, 2), 0, "auto", (1, 2, 1)),
        (of(1, 1), 0, "auto", None),
        (of(2, 8), 2, "auto", (2, 2, 1)),
        (of(2, 8), 0, 8, (2, 4, 1)),
        (of(2, 8), 0, 16, (2, 8, 1)),
        (of(2, 8), 0, 3, None),
        (of(2, 8), 0, 2, None),
        (of(2, 8), 0, 32, None),
        (of(3, 8), 0, "auto", (3, 2, 1)),
        (of(7, 8), 0, 4, (2, 2, 1)),
        (of(2, 4, 8), 0, "auto", (2, 2, 2)),
        (of(2, "auto"), 0, "auto", (2, 1, 1)),
        (of(2, "auto"), 2, "auto", (2, 2, 1)),
        (of(4, "auto", 8), 0, "auto", (2, 1, 2)),
        (of(4, "auto", 2), 0, 4, (2, 1, 2)),
        (of(1, "auto", 8), 2, 4, (1, 2, 2)),
        (of(1, "auto", cp=4), 0, "auto", (1, 1, 1, 2)),
        (of(1, "auto", cp=8), 2, 4, (1, 2, 1, 2)),
        (of(2, 8, cp=8), 0, "auto", (2, 2, 1, 2)),
        (of(1, "auto", cp=4), 0, 8, (1, 2, 1, 4)),
        (of("auto", 8), 0, "auto", (2, 2, 1)),
        (of("auto", 8), 1, "auto", (2, 2, 1)),
        (of("auto", 8), 0, 24, (3, 8, 1)),
        (of("auto", 8, 2), 2, "auto", (2, 2, 2)),
        (of("auto", "auto"), 4, 32, (4, 8, 1)),  # a copy is a node
        (of("auto", "auto", 2), 4, 8, (1, 4, 2)),
        (of("auto", "auto"), 0, "auto", None),
        (of("auto", 2), 0, 5, None),
    ],
)
def test_the_shape_stays(
    parallel: dict[str, Any], nodes: int, nproc: int | str, expected: tuple[int, ...]
) -> None:
    launch = {"engines": ["slurm"] if nodes else [], "nodes": nodes, "devices_per_node": 8}
    assert verified(parallel, launch, nproc) == (expected and (*expected, 1)[:4])


def test_flags_exist_only_where_the_mesh_is_larger(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "smaller").mkdir()
    own = write_project(tmp_path / "own", {**CLUSTER, "verify": {"nproc": 16}})
    assert "--dp-shard" not in (own / "train.py").read_text()
    settings = yaml.safe_load((own / "verify.yaml").read_text())
    assert (settings["nproc"], settings["args"]) == (16, "--out {checkpoint}")
    smaller = write_project(tmp_path / "smaller", CLUSTER)
    source = (smaller / "train.py").read_text()
    assert "--dp-shard" in source and "--dp-replicate" not in source and "--tp" not in source
    settings = yaml.safe_load((smaller / "verify.yaml").read_text())
    assert (settings["nproc"], settings["args"]) == (4, "--out {checkpoint} --dp-shard 2")
    assert "build_mesh(device, args.dp_shard)" in source
    assert yaml.safe_load((smaller / "spec.yaml").read_text())["verify"]["nproc"] == "auto"
    assert load(smaller / "spec.yaml").scaled == {"dp_shard": 2}


@pytest.mark.full
@pytest.mark.launch
def test_a_run_loses_or_gains_copies(tmp_path: Path) -> None:
    """2 x 2 goes on as 3 x 2, and as 1 x 2 and 1 x 1: one trajectory."""
    train = {"steps": 20, "global_batch": 24, "micro_batch": 2}
    parallel, worlds = of("auto", 2), {"reshard_to": [1, 2, 6]}
    project = write_project(
        tmp_path, {**CLUSTER, "parallel": parallel, "train": train, "verify": worlds}
    )
    straight = run(project, 4, tmp_path / "straight", 6)
    run(project, 4, tmp_path / "start", 3, "--checkpoint-interval", "3")
    for ranks, mesh in ((6, "3, 'dp_shard': 2"), (2, "1, 'dp_shard': 2"), (1, "1, 'dp_shard': 1")):
        out = tmp_path / f"on-{ranks}"
        shutil.copytree(tmp_path / "start", out)
        shown = forked(project, ranks, "--out", out, "--steps", 6, "--resume")
        assert f"{{'dp_replicate': {mesh}}}" in shown
        assert_close(steps_of(out), straight)
    refused = finish(start(project, 3, tmp_path / "odd"), status=1)  # torchrun's
    assert "the mesh needs a multiple of 2 ranks (or 1), not 3" in refused


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["parallel.dp_shard=auto"], "parallel.dp_replicate", "needs parallel.dp_shard"),
        (["verify.nproc=5"], "verify.nproc", "a multiple of the 2 ranks of a copy"),
        (["verify.reshard_to=[3]"], "verify.reshard_to", "a multiple of the 2 ranks"),
        (["launch.engines=[slurm]", "launch.devices_per_node=3"], "launch.devices_per_node", "2"),
    ],
)
def test_copies_that_no_number_of_ranks_makes(
    tmp_path: Path, settings: list[str], key: str, words: str
) -> None:
    written = {**CLUSTER, "parallel": of("auto", 2), "train": {"steps": 20, "global_batch": 24}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(written))
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "spec.yaml", settings)
    found = [(problem.key, problem.message) for problem in caught.value.problems]
    assert any(name.startswith(key) and words in message for name, message in found), found


@pytest.mark.parametrize(
    "parallel",
    [
        of("auto", 4),
        of("auto", 4, tp=2),
        of(1, 16),
        of(4, 4),
        of(4, "auto"),
        of(128, 16),
        of(1, 4, tp=4),
        of(4, 4, tp=2),
    ],
    ids=str,
)
def test_a_smaller_mesh_is_formatted_and_lint_clean(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    batch = {**TRAIN, "global_batch": 4096, "micro_batch": 1}
    values = {"parallel": parallel, "train": batch, "data": {"kind": "synthetic", "samples": 8192}}
    project = write_project(tmp_path, {**CLUSTER, "model": {**DECODER, "heads": 4}, **values})
    for words in (("check",), ("format", "--diff")):
        python("-m", "ruff", *words, "--isolated", "--no-cache", ".", cwd=project)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("settings", "ranks", "flags"),
    [
        ((), 4, ["--dp-shard", "2"]),
        (("parallel={dp_shard: auto, tp: 4}", "model.heads=4"), 2, ["--tp", "2"]),
    ],
)
def test_same_losses_on_the_smaller_mesh(
    tmp_path: Path, settings: tuple[str, ...], ranks: int, flags: list[str]
) -> None:
    project = write_project(tmp_path, CLUSTER, *settings)
    found = []
    for count in (1, ranks):
        out = tmp_path / f"out-{count}"
        forked(project, count, "--steps", 3, "--micro-batch", 8, "--out", out, *flags)
        lines = map(json.loads, (out / "run-001" / "metrics.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "loss" in line])
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=2e-6)


def test_files_that_are_elsewhere(tmp_path: Path, command: Command) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(NOWHERE))
    problems = command("spec", "check", spec, "--json", code=2).data["problems"]
    assert {problem["key"] for problem in problems} == {"data.files[0]", "data.tokenizer"}
    assert command("spec", "check", spec, "--offline", "--json", code=0).data["offline"] is True
    assert "--offline" in command("spec", "check", spec, "--offline", code=0).out
    project = tmp_path / "project"
    command("new", spec, project, code=2)
    assert "--offline" in command("new", spec, project, "--offline", code=0).out
    command("update", project, "--set", "train.steps=30", code=2)
    command("update", project, "--set", "train.steps=30", "--offline", code=0)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (
        done.returncode == 2 and "/nowhere/*.jsonl" in done.stderr and done.stderr.count("\n") == 1
    )


def test_offline_skips_files_and_nothing_else(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(NOWHERE))
    with pytest.raises(SpecError, match=r"train\.global_batch"):
        load(spec, ["train.global_batch=9"], offline=True)
    spec.write_text(yaml.safe_dump({**NOWHERE, "data": {"kind": "text", "files": ["/nowhere"]}}))
    with pytest.raises(SpecError, match=r"model\.vocabulary"):
        load(spec, ["model.vocabulary=64"], offline=True)
    chat = {"kind": "chat", "files": ["/nowhere/*.jsonl"], "tokenizer": "/nowhere"}
    spec.write_text(yaml.safe_dump({**NOWHERE, "data": chat}))
    load(spec, offline=True)
    model = {
        "kind": "transformers",
        "pretrained": "/nowhere",
        "vocabulary": 300,
        "sequence_length": 32,
    }
    spec.write_text(yaml.safe_dump({**NOWHERE, "model": model}))
    load(spec, offline=True)
    with pytest.raises(SpecError, match=r"config\.json"):
        load(spec, ["finetune={kind: lora, targets: [q_proj]}"], offline=True)

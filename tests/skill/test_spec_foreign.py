"""Names of other trainers lead to the key that is meant; a spec that is valid and odd is asked
about; sizes and the vocabulary that a spec need not spell out.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from records import Capsys
from scripts import written
from verified_fsdp2.skill.spec import SpecError, explain, foreign_names, load, schema

SPEC = """\
version: 1
model: {kind: decoder, layers: 2, width: 64, heads: 4, vocabulary: 256, sequence_length: 32}
data: {kind: synthetic}
train: {steps: 20, global_batch: 16}
"""
CONFIG = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64}
HF = SPEC.replace(
    "{kind: decoder, layers: 2, width: 64, heads: 4, vocabulary: 256,",
    "{kind: transformers, config: %s,",
)


def problems(path: Path, *overrides: str) -> list[Any]:
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    return list(caught.value.problems)


def test_the_table_is_of_the_schema() -> None:
    own = {name for name, _, _ in schema.walk()}
    names: list[tuple[str, str]] = []
    for key, others, _ in foreign_names.MEANT:
        assert schema.at(tuple(key.split("."))) is not None, key
        names += [(name, key.rpartition(".")[0]) for name in others.split()]
    assert len(set(names)) == len(names), "one name for two keys of one section"
    for name, section in names:
        assert f"{section}.{name}".strip(".") not in own, f"{name} is a key itself"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.dtype=bf16", "precision.param_dtype"),
        ("torch_dtype=bf16", "precision.param_dtype"),
        ("lora_r=8", "finetune.rank"),
        ("finetune.r=8", "rank"),
        ("train.epochs=3", "steps"),
        ("train.batch-size=3", "global_batch"),
        ("train.per_device_train_batch_size=3", "micro_batch"),
        ("train.gradient_accumulation_steps=3", "global_batch"),
        ("max_seq_length=64", "model.sequence_length"),
        ("data.path=corpus.txt", "files"),
        ("optimizer.learning_rate=1e-3", "lr"),
        ("optimizer.name=adamw", "kind"),
        ("dataset=x", "data"),
    ],
)
def test_a_name_of_another_trainer_leads_to_the_key(
    tmp_path: Path, override: str, meant: str
) -> None:
    (problem,) = problems(written(tmp_path, SPEC, "spec.yaml"), override)
    assert f"did you mean {meant!r}?" in problem.message
    assert problem.key == override.partition("=")[0]


@pytest.mark.parametrize("mesh", ["", "parallel: {dp_shard: 8, dp_replicate: 2}\n"])
def test_pipeline_parallelism_is_said_to_be_no_part(tmp_path: Path, mesh: str) -> None:
    (problem,) = problems(written(tmp_path, SPEC + mesh, "spec.yaml"), "parallel.pp=2")
    assert "pipeline parallelism is not offered" in problem.message
    assert "auto" not in problem.message


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        # a dimension that is refused has no ranks to count
        (["parallel.tp=3", "parallel.dp_replicate=2"], ["parallel.tp"]),
        (["parallel.ep=2", "launch={engines: [torchrun], nodes: 3}"], ["parallel.ep"]),
        (["train.global_batch=6", "train.micro_batch=4"], ["train.global_batch"]),
    ],
)
def test_one_cause_is_one_problem(tmp_path: Path, changes: list[str], keys: list[str]) -> None:
    found = problems(written(tmp_path, SPEC, "spec.yaml"), *changes)
    assert [problem.key for problem in found] == keys


def test_a_misplaced_key_is_not_missing_too(tmp_path: Path) -> None:
    text = SPEC.replace(", sequence_length: 32", "").replace("steps: 20", "steps: 20, seq_len: 32")
    (problem,) = problems(written(tmp_path, text, "spec.yaml"))
    assert problem.key == "train.seq_len"


def test_explain_knows_the_names() -> None:
    with pytest.raises(Exception, match=r"did you mean 'finetune\.rank'"):
        explain.find("lora_r")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optimizer.lr=300"], "optimizer.lr 300"),
        (["optimizer={kind: sgd, lr: 300}"], "optimizer.lr 300"),
        (["optimizer.groups=[{match: norm, lr: 5}]"], "optimizer.groups[0].lr 5"),
        (["optimizer={kind: sgd, lr: 2.0}"], ""),
        (["optimizer.lr=0.05"], ""),
    ],
)
def test_a_learning_rate_that_is_seldom_meant(
    tmp_path: Path, capsys: Capsys, changes: list[str], words: str
) -> None:
    load(written(tmp_path, SPEC, "spec.yaml"), changes)
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)


def test_adapters_of_random_weights_are_asked_about(tmp_path: Path, capsys: Capsys) -> None:
    path = written(tmp_path, HF % json.dumps(CONFIG), "spec.yaml")
    lora = "finetune={kind: lora, targets: [q_proj]}"
    load(path, [lora])
    assert "adapters of random weights" in capsys.readouterr().err
    load(path, [lora, "train.init_from=weights"], offline=True)
    load(path)
    assert not capsys.readouterr().err
    load(written(tmp_path, SPEC, "decoder.yaml"), ["finetune={kind: lora, targets: [query]}"])
    assert "they come from train.init_from" in capsys.readouterr().err


def test_the_vocabulary_is_that_of_the_config(tmp_path: Path) -> None:
    inline = written(tmp_path, HF % json.dumps(CONFIG), "inline.yaml")
    assert load(inline)["model"]["vocabulary"] == 320
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    named = written(tmp_path, HF % "config.json", "named.yaml")
    assert load(named)["model"]["vocabulary"] == 320
    (problem,) = problems(named, "model.vocabulary=256")
    assert problem.key == "model.vocabulary"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert [one.key for one in problems(named)] == ["model.vocabulary"]


@pytest.mark.parametrize(
    ("written_as", "gib"),
    [("80", 80), ("80GiB", 80), ("80 gib", 80), ("81920MiB", 80), ("0.5TiB", 512)],
)
def test_memory_is_spelled_as_on_the_command_line(
    tmp_path: Path, written_as: str, gib: float
) -> None:
    launch = f"launch={{engines: [torchrun], device_memory: {written_as}}}"
    assert load(written(tmp_path, SPEC, "spec.yaml"), [launch])["launch"]["device_memory"] == gib


@pytest.mark.parametrize("wrong", ["80GB", "0GiB", "much", "-3", "[80]"])
def test_memory_that_is_no_size(tmp_path: Path, wrong: str) -> None:
    path = written(tmp_path, SPEC, "spec.yaml")
    (problem,) = problems(path, f"launch={{engines: [torchrun], device_memory: {wrong}}}")
    assert problem.key == "launch.device_memory"

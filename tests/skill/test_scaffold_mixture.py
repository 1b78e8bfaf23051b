"""Mixtures of sources and validation files of their own in generated projects."""

import importlib
import json
import math
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_scaffold_data import forks, taken
from test_scaffold_launch import assert_close, finish, run, start, steps_of

from data_project import Project
from trees import DECODER, write_project

SIZES = {"web": 400, "code": 90, "wiki": 41}  # tokens
WEIGHTS = {"web": 0.5, "code": 0.3, "wiki": 0.2}
BASE = {"web": 0, "code": 64, "wiki": 128}  # the token ids of a source start there
MIXTURE = [
    {"name": name, "files": [f"{name}.bin"], "weight": weight} for name, weight in WEIGHTS.items()
]


def write_tokens(folder: Path, apart: int = 1) -> None:
    for name, size in SIZES.items():
        (np.arange(size) % 64 + apart * BASE[name]).astype("<u2").tofile(folder / f"{name}.bin")


def mixed(project: Project, **keys: Any) -> ModuleType:
    write_tokens(project.folder)
    return project.load({"kind": "tokens", "mixture": MIXTURE, **keys})


def source_of(sample: Any) -> str:
    return next(name for name in reversed(BASE) if int(sample[0][0]) >= BASE[name])


def test_each_block_draws_by_weight_and_each_source_goes_through_its_epochs(
    project: Project,
) -> None:
    data = mixed(project, validation_fraction=0.2)
    train, held_out = data.load_data(project.out, 8, 256)
    assert {name: len(part) for name, part in held_out.items()} == {"web": 10, "code": 3, "wiki": 1}
    block = importlib.import_module("mixture").BLOCK
    drawn = [train.index(position, 7) for position in range(3 * block)]
    sources = [source_of(train[index]) for index in range(len(train))]
    for first in range(0, 3 * block, block):
        counts = Counter(sources[index] for index in drawn[first : first + block])
        assert counts == {name: round(block * weight) for name, weight in WEIGHTS.items()}
    counts = Counter(sources[index] for index in drawn[:1000])
    assert all(abs(counts[name] / 1000 - weight) < 0.05 for name, weight in WEIGHTS.items())
    for name in WEIGHTS:
        own, count = [index for index in drawn if sources[index] == name], sources.count(name)
        epochs = [own[first : first + count] for first in range(0, len(own) - count, count)]
        assert len(epochs) > 10 and all(len(set(epoch)) == count for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 10, f"{name}: each epoch has its own order"
    assert drawn[:100] != [train.index(position, 8) for position in range(100)]


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_the_draws_depend_neither_on_the_ranks_nor_on_where_a_run_was_resumed(
    project: Project, workers: int
) -> None:
    data = mixed(project, workers=workers)
    train, _ = data.load_data(project.out, 8, 256)
    straight = taken(project, data, train, range(5), 1, 4)
    assert taken(project, data, train, range(5), 4, 1) == straight
    first, rest = (
        taken(project, data, train, range(2), 2, 2),
        taken(project, data, train, range(2, 5), 4, 1),
    )
    assert first + rest == straight


def test_shares_add_up_and_follow_the_weights(project: Project) -> None:
    mixed(project)
    mixture = importlib.import_module("mixture")
    assert sorted(mixture.share_out([1, 1, 1])) == [3333, 3333, 3334]
    assert mixture.share_out([2, 6]) == [2500, 7500]
    assert mixture.share_out([1, 9999]) == [1, 9999]
    with pytest.raises(
        importlib.import_module("distributed").SetupError, match="source code has no sample"
    ):
        mixture.Mixture([range(3), range(0), range(2)])


def test_validation_files_are_evaluated_whole_and_training_keeps_all_of_its_own(
    project: Project,
) -> None:
    data = mixed(project, validation={"seen": "web.bin", "both": ["code.bin", "wiki.bin"]})
    train, held_out = data.load_data(project.out, 8, 256)
    windows = {name: math.ceil((size - 1) / 8) for name, size in SIZES.items()}
    assert len(train) == sum(windows.values())
    assert {name: len(part) for name, part in held_out.items()} == {
        "seen": 50,
        "both": math.ceil(130 / 8),
    }
    data = project.load({"kind": "tokens", "files": ["web.bin"], "validation": "wiki.bin"})
    train, held_out = data.load_data(project.out, 8, 256)
    assert (len(train), len(held_out)) == (windows["web"], windows["wiki"])
    assert source_of(held_out[0]) == "wiki"
    (project.folder / "short.bin").write_bytes(b"\1\0")
    data = project.load(
        {"kind": "tokens", "files": ["web.bin"], "validation": {"short": "short.bin"}}
    )
    with pytest.raises(data.SetupError, match=r"short\.bin: too little for one sample"):
        data.load_data(project.out, 8, 256)


def test_records_of_several_sources_are_prepared_each(project: Project) -> None:
    for name in WEIGHTS:
        texts = (json.dumps({"text": f"{name} {number}"}) for number in range(20))
        (project.folder / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in texts))
    mixture = [{"name": name, "files": [f"{name}.jsonl"], "weight": 1} for name in ("web", "code")]
    keys = {"kind": "jsonl", "mixture": mixture, "packing": False, "separator": ""}
    data = project.load({**keys, "validation": {"wiki": "wiki.jsonl"}})
    with pytest.raises(data.SetupError, match=r"run python prepare\.py first"):
        data.load_data(8)
    project.prepare()
    train, held_out = data.load_data(8)
    assert (len(train), len(held_out["wiki"])) == (40, 20)
    assert bytes(held_out["wiki"][3][0].tolist()).startswith(b"wiki ")
    assert bytes(train[20][0].tolist()).startswith(b"code ")
    data = project.load({**keys, "validation_fraction": 0.1})
    project.prepare()  # of the sources nothing is made again
    train, held_out = data.load_data(8)
    assert (len(train), {name: len(part) for name, part in held_out.items()}) == (
        36,
        {"web": 2, "code": 2},
    )
    assert len(list((project.folder / "project" / "tokens").glob("*/complete.json"))) == 3


@pytest.mark.launch
@pytest.mark.full
def test_a_mixture_is_resumed_on_more_ranks_and_other_weights_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path, apart=0)
    data = {
        "kind": "tokens",
        "mixture": MIXTURE,
        "validation": {"seen": "web.bin", "both": ["code.bin", "wiki.bin"]},
    }
    spec = {"version": 1, "model": DECODER, "data": data, "precision": {"param_dtype": "float32"}}
    out = write_project(
        tmp_path, {**spec, "train": {"steps": 20, "global_batch": 8, "validate_interval": 4}}
    )
    shown = finish(start(out, 1, tmp_path / "straight", "--steps", "8"))
    records = [
        json.loads(line)
        for line in (tmp_path / "straight/run-001/metrics.jsonl").read_text().splitlines()
    ]
    validated = [record for record in records if "validation_loss/seen" in record]
    assert [record["step"] for record in validated] == [4, 8]
    table = [line.split() for line in shown.splitlines()]
    for name in ("seen", "both"):
        losses = [record[f"validation_loss/{name}"] for record in validated]
        assert [record[f"perplexity/{name}"] for record in validated] == [
            math.exp(loss) for loss in losses
        ]
        best, at = min(losses), 4 * losses.index(min(losses)) + 4
        assert [
            name,
            f"{losses[1]:.4f}",
            f"{math.exp(losses[1]):.2f}",
            f"{best:.4f}",
            str(at),
        ] in table
    run(out, 1, tmp_path / "parts", 4)
    assert_close(
        run(out, 2, tmp_path / "parts", 8, "--resume"), steps_of(tmp_path / "straight"), 1e-5
    )
    written = (out / "mixture.py").read_text()
    (out / "mixture.py").write_text(written.replace('"web": 0.5', '"web": 0.6'))
    shown = finish(start(out, 1, tmp_path / "parts", "--resume"), status=2)
    assert "is from the mixture web 50.00% of 25" in shown and "the data are web 54.5" in shown

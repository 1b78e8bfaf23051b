"""The generated data.py: what it reads, how it splits, and that every rank gets its part and no more."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from verified_fsdp2.skill import scaffold, spec

MODEL = {"kind": "decoder", "layers": 1, "width": 32, "heads": 2, "vocabulary": 256, "sequence_length": 8}


def module(tmp_path: Path, data: dict[str, Any]) -> ModuleType:
    """The generated data.py, imported."""
    spec_path = tmp_path / "spec.yaml"
    whole = {"version": 1, "model": MODEL, "data": data, "train": {"steps": 20, "global_batch": 8}}
    spec_path.write_text(yaml.safe_dump(whole))
    path = tmp_path / "data.py"
    path.write_text(scaffold.render(spec.load(spec_path))["data.py"])
    loading = importlib.util.spec_from_file_location("generated_data", path)
    assert loading and loading.loader
    found = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(found)
    return found


def text_module(tmp_path: Path, content: bytes = b"0123456789" * 20) -> ModuleType:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"fine")
    found = module(tmp_path, {"kind": "text", "files": ["text"], "validation_fraction": 0.25})
    (tmp_path / "text" / "a.txt").write_bytes(content)
    return found


def targets(samples: Sequence[Any], ignored: int) -> list[int]:
    return [t for i in range(len(samples)) for t in samples[i][1].tolist() if t != ignored]


def test_each_token_is_a_target_once_and_no_part_is_in_both(tmp_path: Path) -> None:
    data = text_module(tmp_path)
    train, held_out = data.load_data(8)
    text = list(b"0123456789" * 20)
    assert targets(train, data.IGNORE_INDEX) == text[1:150]
    assert targets(held_out, data.IGNORE_INDEX) == text[151:]
    inputs, shifted = train[0]
    assert inputs.tolist() == text[:8] and shifted.tolist() == text[1:9]


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    data = text_module(tmp_path, b"good \xff bad")
    with pytest.raises(data.SetupError, match=r"a\.txt is not UTF-8 text \(byte offset 5\)"):
        data.load_data(8)


@pytest.mark.parametrize("content", [b"", b" \n", b"x"])
def test_text_that_is_empty_or_too_short_is_an_error(tmp_path: Path, content: bytes) -> None:
    data = text_module(tmp_path, content)
    with pytest.raises(data.SetupError, match=r"no text|too short"):
        data.load_data(8)


def test_missing_files_are_an_error(tmp_path: Path) -> None:
    data = text_module(tmp_path)
    (tmp_path / "text" / "a.txt").unlink()
    with pytest.raises(data.SetupError, match="no file matches"):
        data.load_data(8)


def test_made_up_samples_can_be_learnt_and_are_always_the_same(tmp_path: Path) -> None:
    data = module(tmp_path, {"kind": "synthetic", "samples": 40, "validation_fraction": 0.25})
    train, held_out = data.load_data(16, 256)
    assert (len(train), len(held_out)) == (30, 10)
    again, _ = data.load_data(16, 256)
    lengths = set()
    for index in range(30):
        inputs, shifted = train[index]
        valid = (shifted != data.IGNORE_INDEX).sum().item()
        lengths.add(valid)
        assert 8 <= valid <= 16 and (inputs[1:valid] == shifted[: valid - 1]).all()
        assert len(set((inputs.diff() % 64).tolist())) == 1
        assert (again[index][1] == shifted).all()
    assert len(lengths) > 1


def test_fewer_samples_than_a_global_batch_is_an_error(tmp_path: Path) -> None:
    data = module(tmp_path, {"kind": "synthetic"})
    with pytest.raises(data.SetupError, match="7 training samples do not fill one global batch of 8"):
        data.GlobalBatches(range(7), 8, 1, 0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    data = module(tmp_path, {"kind": "synthetic", "samples": 30})
    train, held_out = data.load_data(16, 256)

    def of_all_ranks(world_size: int, position: int) -> tuple[list[Any], list[Any]]:
        taken, checked, calls = [], [], set()
        for rank in range(world_size):
            fake = SimpleNamespace(get_rank=lambda rank=rank: rank, get_world_size=lambda: world_size)
            monkeypatch.setattr(data, "dist", fake)
            loader = data.GlobalBatches(train, 8, 2, 0)
            micro = loader.micro_batches(position)
            fixed = loader.fixed_batches(held_out, 4)
            calls.add((len(micro), len(fixed)))
            taken += [row for _, part in micro for row in part.tolist()]
            checked += [row for _, part in fixed for row in part.tolist() if max(row) >= 0]
        assert len(calls) == 1, "all ranks must call the model equally often"
        return taken, sorted(checked)

    for position in (0, 24):  # the second crosses the end of an epoch
        assert of_all_ranks(world_size, position) == of_all_ranks(1, position)

"""Old names of keys and values are read as the new ones, with a note; `fsdp2 update` puts the new
ones into spec.yaml.
"""

from pathlib import Path

import pytest
import yaml

from records import Capsys, cases
from trees import SPEC, Workshop
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import SpecError, load, renamed, rewrite, schema

OLD = (
    SPEC.replace("global_batch: 8}", "global_batch: 8,\n  clip_norm: 2}")
    + "verify: {ranks: 4}\nlaunch:\n  engines: [torchrun]\n  devices_per_node: 4\n  device: gpu\n"
)
FILES = {"a.py": "STEPS = {steps}\n"}


def write(folder: Path, text: str) -> Path:
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def notes(capsys: Capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_the_table_is_of_the_schema() -> None:
    for old, new in renamed.KEYS.items():
        assert schema.at(tuple(new.split("."))) and not schema.at(tuple(old.split(".")))
        assert old.partition(".")[0] == new.partition(".")[0]
    assert not any(schema.at(tuple(key.split("."))) for key in renamed.REMOVED)
    for key, values in renamed.VALUES.items():
        choices = (schema.at(tuple(key.split("."))) or {})["enum"]
        assert {*values.values()} <= {*choices} and not {*values} & {*choices}


def test_old_names_are_accepted_with_a_note_each(tmp_path: Path, capsys: Capsys) -> None:
    path = write(tmp_path, OLD)
    spec = load(path)
    assert (spec["train"]["max_norm"], spec["verify"]["nproc"], spec["launch"]["device"]) == (
        2.0,
        4,
        "cuda",
    )
    assert notes(capsys) == [
        f"{path}:5: train.clip_norm is now train.max_norm; the old name is accepted until 0.3",
        f"{path}:6: verify.ranks is now verify.nproc; the old name is accepted until 0.3",
        (
            f"{path}:10: launch.device: gpu is now launch.device: cuda; the old value is accepted"
            " until 0.3"
        ),
    ]
    assert load(write(tmp_path, rewrite.with_new_names(OLD))) == spec and not notes(capsys)


def test_a_problem_is_placed_at_the_old_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, OLD.replace("clip_norm: 2", "clip_norm: no")))
    (problem,) = caught.value.problems
    assert (problem.key, problem.place.line, problem.place.column) == ("train.max_norm", 5, 14)


@cases(
    "text, overrides",
    ("parallel: {gathered_blocks: 0}\n", []),
    ("memory: {every: 2}\n", []),
    ("operation:\n  plot: false\n", []),
    ("", ["operation.plot=false"]),
)
def test_what_was_taken_out_and_did_nothing_is_noted(
    tmp_path: Path, capsys: Capsys, text: str, overrides: list[str]
) -> None:
    assert load(write(tmp_path, SPEC + text), overrides) == load(write(tmp_path, SPEC))
    (line,) = notes(capsys)
    assert "is no key any more; remove it" in line


@cases(
    "text, line, message",
    (
        "parallel:\n  tp: 1\n  gathered_blocks: 2\n",
        7,
        "parallel.gathered_blocks is no key any more; write parallel.reshard_after_forward: false",
    ),
    (
        "memory: {activation_checkpointing: full, every: 3}\n",
        5,
        "memory.every is no key any more; write memory.activation_checkpointing: full",
    ),
    (
        "operation: {plot: 0}\n",
        5,
        "operation.plot is no key any more; write operation.tensorboard: true or"
        " operation.wandb: true",
    ),
    (
        "memory: {activation_checkpointing: every-nth}\n",
        5,
        "memory.activation_checkpointing must be 'none', 'full' or 'op-selective'",
    ),
    (
        "parallel: {reshard_after_forward: [true, false]}\n",
        5,
        "parallel.reshard_after_forward must be true or false or a whole number, found a list",
    ),
)
def test_what_was_taken_out_is_refused_with_what_to_write(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, SPEC + text))
    (problem,) = caught.value.problems
    assert message in problem.message and problem.place.line == line


@cases(
    "before, after",
    ("gathered_blocks: 0  # mine\n  tp: 1", "tp: 1"),
    ("tp: 1\n  gathered_blocks: 0", "tp: 1"),
)
def test_lines_of_what_was_taken_out_go(
    tmp_path: Path, capsys: Capsys, before: str, after: str
) -> None:
    text = rewrite.with_new_names(f"{SPEC}parallel:\n  {before}\n")
    assert text == f"{SPEC}parallel:\n  {after}\n"
    load(write(tmp_path, text))
    assert not notes(capsys)


@cases(
    "overrides, expected",
    (["train.clip_norm=3"], (3.0, 2, "cuda")),
    (["train.max_norm=1", "train.clip_norm=3"], (3.0, 2, "cuda")),
    (["train.clip_norm=3", "train.max_norm=1"], (1.0, 2, "cuda")),
    (["verify={ranks: 4}", "launch.device=gpu", "launch.engines=[torchrun]"], (0.5, 4, "cuda")),
)
def test_overrides(
    tmp_path: Path, capsys: Capsys, overrides: list[str], expected: tuple[float, int, str]
) -> None:
    path = write(tmp_path, SPEC.replace("global_batch: 8", "global_batch: 8, max_norm: 0.5"))
    spec = load(path, overrides)
    assert (
        spec["train"]["max_norm"],
        spec["verify"]["nproc"],
        spec["launch"]["device"],
    ) == expected
    assert all(line.startswith("--set ") and "is now" in line for line in notes(capsys))


def test_both_names_are_a_problem(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, SPEC + "verify: {nproc: 4,\n  ranks: 4}\n"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.place.line) == (
        "verify.ranks",
        6,
    ) and "verify.nproc" in problem.message


@pytest.mark.parametrize("edited", [False, True])
def test_update_of_a_project_with_old_names(workshop: Workshop, edited: bool) -> None:
    workshop.templates = dict(FILES)
    files = workshop.render(load(workshop.spec))
    old = (
        files["spec.yaml"]
        .replace("  max_norm: ", "  clip_norm: ")
        .replace("  nproc: ", "  ranks: ")
    )
    scaffold.write({**files, "spec.yaml": old}, workshop.out)
    if edited:
        workshop.edit("spec.yaml", "  clip_norm: 1.0\n", "  # mine\n  clip_norm: 5.0  # less\n")
    done = workshop.update("--set", "train.steps=77", "--set", "verify.ranks=4")
    assert len(done.err.splitlines()) == 3
    text = workshop.read("spec.yaml")
    assert (
        "clip_norm" not in text and "ranks" not in text and workshop.read("a.py") == "STEPS = 77\n"
    )
    assert ("  # mine\n  max_norm: 5.0  # less\n" in text) is edited
    assert yaml.safe_load(text)["verify"]["nproc"] == 4
    assert workshop.settled() and not workshop.update().err


def test_a_spec_that_is_a_link_is_left_with_its_old_names(workshop: Workshop) -> None:
    workshop.make(FILES)
    target = workshop.spec.with_name("mine.yaml")
    target.write_text(OLD.partition("verify:")[0])
    (workshop.out / "spec.yaml").unlink()
    (workshop.out / "spec.yaml").symlink_to(target)
    workshop.update()
    assert "clip_norm" in target.read_text()

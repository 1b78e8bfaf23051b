"""`fsdp2 new`, from its arguments to what is on disk and on stdout."""

import argparse
import json
from pathlib import Path

import pytest

from scripts import written
from trees import SPEC, Capsys
from verified_fsdp2.skill.cli import new
from verified_fsdp2.verifier.errors import UserError

MODULES = ("train", "model", "optim", "data", "checkpoint", "runs", "metrics", "distributed")
OTHERS = ["verify.yaml", "spec.yaml", "README.md", "tests/test_train.py", ".github/workflows/verify.yml"]
PROJECT_FILES = sorted([*(f"{name}.py" for name in MODULES), *OTHERS])  # all but the manifest and what it keeps


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    new.add_parser(parser.add_subparsers())
    args = parser.parse_args(["new", *arguments])
    result: int = args.run(args)
    return result


@pytest.fixture
def spec_path(tmp_path: Path) -> str:
    path = written(tmp_path, SPEC, "spec.yaml")
    return str(path)


def test_writes_the_project_and_says_what_next(tmp_path: Path, spec_path: str, capsys: Capsys) -> None:
    assert run(spec_path, str(tmp_path / "out")) == 0
    assert all((tmp_path / "out" / path).is_file() for path in PROJECT_FILES)
    said = capsys.readouterr().out
    assert "train.py" in said and "torchrun --standalone --nproc-per-node 2 train.py" in said


def test_json(tmp_path: Path, spec_path: str, capsys: Capsys) -> None:
    assert run(spec_path, str(tmp_path / "a b"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == PROJECT_FILES and said["dry_run"] is False
    assert said["next"][0] == f"cd '{tmp_path / 'a b'}'"


def test_dry_run_writes_nothing_but_checks_all(tmp_path: Path, spec_path: str, capsys: Capsys) -> None:
    assert run(spec_path, str(tmp_path / "out"), "--dry-run") == 0
    assert "would write" in capsys.readouterr().out
    for words, message in ((["out", "--set", "train.steps=none"], r"train\.steps"), (["", "--dry-run"], "not empty")):
        with pytest.raises(UserError, match=message):
            run(spec_path, str(tmp_path / words[0]), *words[1:])
    assert not (tmp_path / "out").exists()


def test_settings_reach_the_project_and_an_older_one_needs_force(tmp_path: Path, spec_path: str) -> None:
    out = str(tmp_path / "out")
    assert run(spec_path, out, "--set", "train.steps=77", "--set", "train.seed=5") == 0
    assert "SEED = 5\n" in (tmp_path / "out" / "train.py").read_text()
    with pytest.raises(UserError, match="--force"):
        run(spec_path, out)
    assert "STEPS = 77 " in (tmp_path / "out" / "optim.py").read_text()
    assert run(spec_path, out, "--force", "--set", "train.steps=33") == 0
    assert "STEPS = 33 " in (tmp_path / "out" / "optim.py").read_text()


def test_force_names_the_edited_files_that_it_replaces(tmp_path: Path, spec_path: str, capsys: Capsys) -> None:
    out = tmp_path / "out"
    again = (spec_path, str(out), "--force", "--set", "train.steps=33")
    assert run(spec_path, str(out)) == 0
    (out / "model.py").write_text("mine\n")
    (out / "README.md").unlink()
    (out / "train.py").write_bytes((out / "train.py").read_bytes().replace(b"\n", b"\r\n"))
    capsys.readouterr()
    assert run(*again, "--dry-run") == 0
    assert "edits of: model.py\n" in capsys.readouterr().out
    assert (out / "model.py").read_text() == "mine\n"
    assert run(*again, "--json") == 0
    assert json.loads(capsys.readouterr().out)["replaced_edits"] == ["model.py"]
    assert run(*again) == 0
    assert "you had edited" not in capsys.readouterr().out
    (out / ".fsdp2" / "manifest.json").unlink()
    (out / "data.py").write_text("mine\n")
    assert run(*again) == 0
    assert "edits of: data.py\n" in capsys.readouterr().out

"""Where a target comes from, and what wrong input gets."""

import argparse
from pathlib import Path

import pytest

from records import cases
from scripts import written
from trees import build_file_tree
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.source.lines import find_local_norm
from verified_fsdp2.verifier.source.project import Files
from verified_fsdp2.verifier.source.sources import project_files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"train.py": "import model\n", "model.py": "from parts.block import Block\n"}
    files["parts/block.py"] = "def clip(g):\n    n = g.to_local().norm()\n    return n\n"
    files["verify.yaml"] = 'nproc: 4\nargs: --out {checkpoint}\nresume_args: --resume "a b"\n'
    build_file_tree(tmp_path, files | {"other.py": "x = y.to_local().norm()\n"})
    return tmp_path


def test_a_folder_is_read_through_its_verify_yaml_and_flags_win(project: Path) -> None:
    target = resolve(project, {"nproc": "3", "steps": None})
    assert (target.script, target.nproc, target.cwd) == (project / "train.py", 3, project)
    assert (target.args, target.resume_args) == (("--out", "{checkpoint}"), ("--resume", "a b"))
    assert (target.reshard_to, target.command) == (
        (1, 6),
        ("fsdp2", "verify", str(project), "--nproc", "3"),
    )


def test_a_script_needs_no_file(project: Path) -> None:
    target = resolve(project / "train.py", {"args": ["--lr", "1 2"], "reshard_to": "1,2"})
    assert (target.nproc, target.args, target.reshard_to) == (2, ("--lr", "1 2"), (1, 2))
    assert target.command[3:] == ("--reshard-to", "1,2", "--", "--lr", "1 2")
    assert [resolve(project, {"steps": value}).steps for value in ("auto", "7")] == [0, 7]


@cases(
    "value, words",
    ("--resume", ("--resume-args=--resume",)),
    ("--resume {checkpoint}", ("--resume-args", "--resume {checkpoint}")),
)
def test_the_command_can_be_given_again(value: str, words: tuple[str, ...], project: Path) -> None:
    target = resolve(project / "train.py", {"resume_args": value})
    assert target.command[3:] == words
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-args")
    assert parser.parse_args(target.command[3:]).resume_args == value


@cases(
    "flags, message",
    ({"nproc": "two"}, "nproc: expected a whole number, found 'two'"),
    ({"nproc": "0"}, "nproc: must be at least 1"),
    ({"timeout": "-1"}, "timeout: must be a positive number"),
    ({"save_args": "--x 'y"}, "save_args: No closing quotation"),
    ({"device": "tpu"}, "device: expected one of auto, cpu, cuda, cuda-on-cpu, found 'tpu'"),
    ({"steps": "few"}, "steps"),
)
def test_wrong_flags(project: Path, flags: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(project, flags)


@cases(
    "content, message",
    (b"steps: 3\nx = = 1\n", "train.py:2:5: this is not Python: invalid syntax"),
    (b"x = '\xff\xfe'\n", "this is not Python"),
    (b"x = 1\0\n", "source code string cannot contain null bytes"),
    (None, "no such file or folder"),
)
def test_a_file_that_is_not_python_or_not_there(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "train.py").write_bytes(content)
    with pytest.raises(UserError) as caught:
        resolve(tmp_path / "train.py", {})
    assert message in str(caught.value)


def test_a_configuration_names_a_script_that_is_there_and_the_working_folder_is_its_own(
    project: Path,
) -> None:
    (project / "verify.yaml").write_text("script: none.py\n")
    with pytest.raises(UserError, match=r"none\.py: no such file"):
        resolve(project, {})
    (project / "verify.yaml").write_text("script: parts/block.py\n")
    assert resolve(project, {}).cwd == project


def test_only_imported_files_belong_to_the_project(project: Path) -> None:
    files = project_files(project / "train.py")
    assert [f.relative_to(project).as_posix() for f in files] == [
        "train.py",
        "model.py",
        "parts/block.py",
    ]
    place = find_local_norm(Files().sources(files))
    assert (Path(place.file).name, place.line, place.function) == ("block.py", 2, "clip")


def test_the_script_that_it_was_converted_from(project: Path, tmp_path: Path) -> None:
    old = written(tmp_path, "print('old')\n", "old.py")
    target = resolve(project, {"reference": f"{old} --small 'a b'"})
    assert target.reference == (str(old), "--small", "a b")
    assert target.describe()["reference"].startswith(str(old))
    with pytest.raises(UserError, match="no such file"):
        resolve(project, {"reference": "nowhere.py --small"})
    with pytest.raises(UserError, match=r"train\.py is the"):
        resolve(project, {"reference": str(target.script)})
    old.write_text("print(\n")
    with pytest.raises(UserError, match=r"old\.py:1:.*not Python"):
        resolve(project, {"reference": str(old)})


def test_what_is_watched(project: Path) -> None:
    everywhere = ("ranks", "resume", "world", "single")
    across = {
        "ema.shadow": everywhere,
        "best across=ranks,resume": ("ranks", "resume"),
        "sampler.position rank-local": ("resume",),
        "a.b:name": everywhere,
        "file:out/*.pt": ("resume", "world", "single"),
    }
    target = resolve(project, {"watch": list(across)})
    assert [(one.expression, one.across) for one in target.watch] == [
        (k.split()[0], v) for k, v in across.items()
    ]
    assert "--watch" in target.command
    for wrong in ("a b", "f(x)", "best across=nothing", "import x", ""):
        with pytest.raises(UserError, match="watch"):
            resolve(project, {"watch": [wrong]})


LOCAL_CLIP = """
def as_local(t):
    return t.to_local() if isinstance(t, DTensor) else t

def main(max_grad_norm):
    print(sum(p.to_local().numel() for p in model.parameters()), max_grad_norm)
    sizes = max_grad_norm

def clip(params):
    norm = get_total_norm([as_local(p.grad) for p in params])
"""


def test_a_clip_that_takes_shards_by_a_function_of_its_own_is_located() -> None:
    place = find_local_norm(Sources({"train.py": LOCAL_CLIP}, ("train.py",)))
    assert place is not None
    assert (place.function, place.line) == ("clip", 10)

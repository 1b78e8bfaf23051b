"""`fsdp2 new`, from its arguments to what is on disk and on stdout."""

from pathlib import Path

import pytest
import yaml

from scripts import Command, python, written
from trees import DECODER, SMALL, SPEC, build_file_tree
from verified_fsdp2.skill.spec import load

MODULES = (
    "train",
    "model",
    "optim",
    "data",
    "checkpoint",
    "runs",
    "metrics",
    "settings",
    "record",
    "distributed",
)
TRAIN = {"steps": 20, "global_batch": 8}
OTHERS = [
    "verify.yaml",
    "spec.yaml",
    "README.md",
    "tests/test_train.py",
    ".github/workflows/verify.yml",
    ".gitignore",
    "pyproject.toml",
]
PROJECT_FILES = sorted(
    [*(f"{name}.py" for name in MODULES), *OTHERS]
)  # all but the manifest and what it keeps


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Command:
    """run(*words) -> Done of `new`, in a folder `out`."""
    spec = written(tmp_path, SPEC, "spec.yaml")
    return lambda *words, out="out", **more: command("new", spec, tmp_path / out, *words, **more)


def test_writes_the_project_and_says_what_next(tmp_path: Path, run: Command) -> None:
    said = run(code=0).out
    assert all((tmp_path / "out" / path).is_file() for path in PROJECT_FILES)
    assert "train.py" in said and "torchrun --standalone --nproc-per-node 2 train.py" in said


def test_a_large_model_is_tried_as_a_small_one_on_a_laptop(run: Command) -> None:
    large = ["--set", "model={kind: decoder, preset: 8b}", "--set", "train.global_batch=64"]
    said = run("--no-plan", *large, code=0).out
    assert "next, on this machine (a laptop will do):" in said
    assert "python train.py --debug-model --global-batch 8 --micro-batch 1" in said
    said = run("--no-plan", *large, "--set", "verify.model=null", out="whole", code=0).out
    assert "laptop" not in said and "python train.py\n" in said


def test_data_that_need_tokens_have_one_command_more(tmp_path: Path, run: Command) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 40)
    words = ("--set", "data={kind: jsonl, files: [a.jsonl]}", "--set", "model.vocabulary=256")
    assert run("--json", *words, code=0).data["next"][1] == "python prepare.py"
    assert "python prepare.py" not in run("--json", out="b", code=0).data["next"]


def test_a_project_and_its_data_move_together(tmp_path: Path, command: Command) -> None:
    """What the spec names from its folder, the project names from its own: no path of the machine
    where it was written is in it.
    """
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "data").mkdir(parents=True)
    for name in ("a", "b"):
        (here / "data" / f"{name}.txt").write_text("some text\n" * 400)
    files = {"kind": "text", "files": ["data/*.txt"], "validation": ["data"]}
    base = {**SMALL, "model": {**DECODER, "vocabulary": 256}, "train": TRAIN, "data": files}
    (here / "spec.yaml").write_text(yaml.safe_dump(base))
    command("new", here / "spec.yaml", here / "runs" / "one", code=0)
    here.rename(there)
    project = there / "runs" / "one"
    texts = [path.read_text() for path in project.rglob("*.*") if path.is_file()]
    assert not [text for text in texts if str(tmp_path) in text]
    command("diff", project, code=0)
    code = "import data; print(*[f.resolve() for f in data.find_files(data.FILES)])"
    found = python("-c", code, cwd=project).stdout.split()
    assert found == [str(there.resolve() / "data" / name) for name in ("a.txt", "b.txt")]
    kept = load(project / "spec.yaml")
    assert kept["data"]["files"] == [str(project / "../../data/*.txt")]
    command("update", project, "--set", "train.steps=30", code=0)
    assert load(project / "spec.yaml")["data"] == kept["data"]


def test_json(tmp_path: Path, run: Command) -> None:
    said = run("--json", out="a b", code=0).data
    assert said["files"] == PROJECT_FILES and said["dry_run"] is False
    assert said["next"][0] == f"cd '{tmp_path / 'a b'}'"


def test_dry_run_writes_nothing_but_checks_all(tmp_path: Path, run: Command) -> None:
    assert "would write" in run("--dry-run", code=0).out
    assert "train.steps" in run("--set", "train.steps=none", code=2).err
    assert "not empty" in run("--dry-run", out="", code=2).err
    assert not (tmp_path / "out").exists()


def test_settings_reach_the_project_and_an_older_one_needs_force(
    tmp_path: Path, run: Command
) -> None:
    run("--set", "train.steps=77", "--set", "train.seed=5", code=0)
    assert "seed: int = flag(5," in (tmp_path / "out" / "settings.py").read_text()
    assert "--force" in run(code=2).err
    assert "steps: int = flag(77," in (tmp_path / "out" / "settings.py").read_text()
    run("--force", "--set", "train.steps=33", code=0)
    assert "steps: int = flag(33," in (tmp_path / "out" / "settings.py").read_text()


def test_force_names_the_edited_files_that_it_replaces(tmp_path: Path, run: Command) -> None:
    out, again = tmp_path / "out", ("--force", "--set", "train.steps=33")
    run(code=0)
    build_file_tree(out, {"model.py": "mine\n", "README.md": None})
    (out / "train.py").write_bytes((out / "train.py").read_bytes().replace(b"\n", b"\r\n"))
    assert "edits of: model.py\n" in run(*again, "--dry-run", code=0).out
    assert (out / "model.py").read_text() == "mine\n"
    assert run(*again, "--json", code=0).data["replaced_edits"] == ["model.py"]
    assert "you had edited" not in run(*again, code=0).out
    build_file_tree(out, {".fsdp2/manifest.json": None, "data.py": "mine\n"})
    assert "edits of: data.py\n" in run(*again, code=0).out

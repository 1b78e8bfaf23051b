"""The evals: tasks, evals.json and README belong together, the grader stands on its own, and it
judges.
"""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import check_grader
import grade
import write
from documents import BLOCK, ROOT
from grader.checks import CHECKS
from grader.tasks import EVALS, load, names, negatives
from records import Capsys, Patch
from scripts import python
from verified_fsdp2.skill.copies import contents

README = (EVALS / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for kind, text in BLOCK.findall(README) if kind == "bash" for line in text.splitlines()
]
TASK = "repair-norm-by-ranks"  # the one of the README
WRONG = "norms-summed"
MINE = {"grade", "grader", "write", "check_grader"}


def test_there_are_enough_of_each_kind() -> None:
    tasks = [load(name) for name in names()]
    assert len(tasks) >= 24
    assert sum(len(task.wrong) for task in tasks) >= 24
    repairs = [task for task in tasks if task.name.startswith("repair-")]
    assert min(len(repairs), len(tasks) - len(repairs)) >= 10
    others = {"deepspeed-zero", "lightning-managed", "inference-out-of-memory", "jax-sharding"}
    assert others <= {row["name"] for row in negatives()}
    large = sum("project" in task.name for task in tasks)
    assert f"{len(tasks) - large} small repositories and {large} of project size" in README
    assert f"{len(negatives())} requests" in README


def test_projects_have_the_size_of_projects_and_share_what_they_have_in_common(
    tmp_path: Path,
) -> None:
    projects = [load(name) for name in names() if "project" in name]
    kinds = [task.name.partition("-")[0] for task in projects]
    assert kinds.count("convert") >= 3 and kinds.count("repair") >= 4 and "review" in kinds
    for task in projects:
        given = task.write("start", tmp_path / task.name)
        modules = list(given.rglob("*.py"))
        assert len(modules) >= 10
        assert (
            sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules) >= 1000
        ), task.name
    own = [
        path
        for task in projects
        for path in task.folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    shared = (EVALS / "shared" / "kit").glob("*.py")
    assert sum(path.stat().st_size for path in [*own, *shared]) < 500_000


@pytest.mark.parametrize("name", names())
def test_a_task_is_complete(name: str, tmp_path: Path) -> None:
    task = load(name)
    labels = {f"{kind}:{expected['run']}" for kind, expected in grade.parameters(task)}
    assert task.wrong and task.values["start"]
    for variant in task.variants:
        expected = check_grader.foreseen(task, variant)
        assert expected["why"] or variant == "solution"
        assert bool(expected["fails"]) == (variant == "start" or variant.startswith("wrong/"))
        assert set(expected["fails"]) <= labels
        assert (
            not any(check.startswith("runs:") for check in expected["fails"]) or expected["says"]
        ), "which error?"
    texts = set()
    for number, variant in enumerate(task.variants):
        folder = task.write(variant, tmp_path / str(number))
        code = {
            p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8")
            for p in folder.rglob("*.py")
        }
        assert all(ast.parse(text) for text in code.values())
        others = {
            p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8")
            for p in folder.rglob("*.md")
        }
        texts.add(json.dumps(code | others))
    assert len(texts) == len(task.variants), "two of them are the same"
    ast.parse((task.write_oracle(tmp_path / "oracle") / task.script).read_text(encoding="utf-8"))
    assert task.script in task.values["prompt"] and (tmp_path / "0" / task.script).exists()


def test_evals_json_is_made_from_the_tasks() -> None:
    evals = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))
    assert evals == write.evals(), "run python evals/write.py json"
    assert evals["skill_name"] == contents.NAME
    rows = evals["evals"]
    assert [row["id"] for row in rows] == list(range(1, len(names()) + len(negatives()) + 1))
    assert all(row["prompt"] and row["expected_output"] and row["assertions"] for row in rows)
    assert all((ROOT / path).is_file() for row in rows for path in row["files"])
    assert not any("{" in sentence for row in rows for sentence in row["assertions"])


def test_every_check_is_used_and_documented_and_no_copy_of_the_skill_has_the_solutions() -> None:
    assert {kind for name in names() for kind, _ in load(name).checks} == set(CHECKS)
    assert [kind for kind in CHECKS if f"`{kind}`" not in README] == []
    assert not [path for path in contents.pack_files() if path.startswith("evals")]
    assert (
        "evals"
        not in (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.ruff]")[0]
    )


def test_nothing_imports_the_verifier() -> None:
    files = [path for path in EVALS.rglob("*.py") if "tasks" not in path.relative_to(EVALS).parts]
    assert len(files) >= 10
    for path in files:
        roots = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add(str(node.module).partition(".")[0])
        assert roots <= sys.stdlib_module_names | MINE | {"torch", "yaml"}, path
        assert not roots & {"importlib", "pkgutil"}, path
        assert "verified_fsdp2" not in path.read_text(encoding="utf-8"), path


def test_bad_usage_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([TASK, str(tmp_path / "none")], ["no-such-task", str(tmp_path)]):
        with pytest.raises(SystemExit) as stopped:
            grade.main(arguments)
        assert stopped.value.code == 2
    assert write.main(["start", TASK, str(tmp_path)]) == 2
    assert write.main(["wrong/none", TASK, str(tmp_path / "new")]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.launch
def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """As they stand there; the agent's work is the reference solution."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    scripts = []
    for line in COMMANDS:
        python, script, *arguments = shlex.split(line)
        scripts.append(script)
        assert python == "python" and (ROOT / script).is_file()
        if script == "evals/write.py":
            assert write.main(arguments) == 0
        elif script == "evals/check_grader.py":
            assert check_grader.parser().parse_args(arguments)
        else:
            load(TASK).write("solution", tmp_path / "solved")
            (tmp_path / "eval" / "train.py").write_text(
                (tmp_path / "solved" / "train.py").read_text()
            )
            done = python(EVALS / "grade.py", *arguments)
            assert json.loads(done.stdout)["passed"] is True
    assert load(TASK).values["prompt"].strip() in capsys.readouterr().out
    kept = json.loads((tmp_path / "grading.json").read_text())
    assert kept["summary"]["pass_rate"] == 1
    assert [row["text"] for row in kept["assertion_results"]] == grade.sentences(load(TASK))
    assert set(scripts) == {f"evals/{name}.py" for name in ("write", "grade", "check_grader")}


@pytest.mark.full
@pytest.mark.launch
def test_a_wrong_solution_fails_where_its_task_says(tmp_path: Path) -> None:
    done = python(
        EVALS / "grade.py", TASK, load(TASK).write(f"wrong/{WRONG}", tmp_path / "wrong"), status=1
    )
    report = json.loads(done.stdout)
    failed = {row["name"]: row["detail"] for row in report["checks"] if not row["passed"]}
    assert set(failed) == set(load(TASK).wrong[WRONG]["fails"])
    assert re.search(r"off by .* allowed", failed["trajectory:two"])

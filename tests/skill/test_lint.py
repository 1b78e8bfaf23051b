"""`fsdp2 lint`: its output, its exit codes, bad usage, and what it imports."""

import errno
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest

from records import cases
from scripts import Command, python, written
from verdicts import REPORT
from verified_fsdp2.verifier.config.reading import inputs

TESTS = Path(__file__).parents[1]
LATE = TESTS / "faults" / "optim_before_shard.py"
RIGHT = TESTS / "zoo" / "minimal.py"
Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(command: Command) -> Command:
    """run(*words) -> Done of `lint`."""
    return partial(command, "lint")


@pytest.fixture
def report(run: Command) -> Report:
    """report(*words) -> (exit code, the JSON report) of `lint`."""

    def lint(*words: object) -> tuple[int, dict[str, Any]]:
        code, out, err = run(*words, "--json")
        assert err == ""
        made = json.loads(out)
        jsonschema.validate(made, REPORT)
        return code, made

    return lint


def test_a_fault(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LATE.parent)
    code, out, err = run("optim_before_shard.py")
    said = (
        "FAIL optim-before-shard",
        "optim_before_shard.py:67 in main",
        "torch.optim.AdamW(",
        "fsdp2 lint ",
    )
    assert (code, err, [part for part in said if part not in out]) == (1, "", [])
    assert [run(LATE, *words)[0] for words in SELECTED] == [1, 1, 0, 0]


def test_no_findings_is_no_pass(run: Command, report: Report) -> None:
    code, made = report(RIGHT)
    assert (code, made["verdict"], made["tier"], made["findings"]) == (
        0,
        "no_findings",
        "static",
        [],
    )
    sources = made["facts"]["sources"]
    assert (sources["files"], sources["without_training"], sources["calls_not_followed"]) == (
        1,
        0,
        0,
    )
    assert (
        sources["functions"]
        == len([line for line in RIGHT.read_text().splitlines() if "def " in line]) + 1
    )
    assert len(sources["rules"]) > 40 and made["limits"]
    code, out, _ = run(RIGHT)
    assert (
        code == 0
        and out.count("\n") == 1
        and "pass" not in out
        and f"{sources['functions']} " in out
    )


OTHERS = """
import torch
import lib
from .near import start
from gone import *
from torch.distributed.fsdp import fully_shard

@lib.app
def main(model, hook):
    fully_shard(model)
    engine = lib.Engine(model)
    for _ in range(3):
        engine.backward(hook(model))
        engine.step()
    start()
    begin()

main(torch.nn.Linear(2, 2), lib.hook)
"""


def test_what_was_not_followed_is_named(report: Report, tmp_path: Path) -> None:
    script = written(tmp_path, OTHERS)
    code, made = report(script)
    sources = made["facts"]["sources"]
    named = {(one["callee"], one["line"], one["kind"]) for one in sources["not_followed"]}
    assert code == 0 and named == {
        ("start", 15, "not found"),
        ("begin", 16, "not found"),
        ("@lib.app", 8, "decorator"),
        ("lib.Engine", 11, "outside the project"),
        ("hook", 13, "outside the project"),
        ("engine.backward", 13, "outside the project"),
        ("engine.step", 14, "outside the project"),
    }
    assert (
        sources["calls_not_followed"] == 7 == sum(one["calls"] for one in sources["not_followed"])
    )
    assert [one["kind"] for one in sources["not_followed"]][:2] == ["not found"] * 2, (
        "the project's own come first"
    )
    assert all(one["file"] == str(script) and one["reason"] for one in sources["not_followed"])


def test_the_list_is_bounded(run: Command, report: Report, tmp_path: Path) -> None:
    script = written(
        tmp_path, RIGHT.read_text() + "\nimport lib\n" + "".join(f"lib.f{n}()\n" for n in range(50))
    )
    _, made = report(script)
    assert (
        made["facts"]["sources"]["calls_not_followed"],
        len(made["facts"]["sources"]["not_followed"]),
    ) == (50, 20)
    assert run(script)[1].count("not followed: ") == 5
    assert run(script, "--verbose")[1].count("not followed: ") == 20


def test_a_call_that_is_followed_elsewhere_is_not_named(report: Report, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def twice(function):\n    function()\n    function()\n")
    imports = "from loop import twice\nfrom torch.distributed.fsdp import fully_shard\n"
    (tmp_path / "train.py").write_text(imports + "twice(lambda: fully_shard(x))\n")
    _, made = report(tmp_path / "loop.py", "--allow-no-training")
    assert made["facts"]["sources"]["calls_not_followed"] == 2
    _, made = report(tmp_path)
    assert made["facts"]["sources"]["calls_not_followed"] == 0


NO_TRAINING = {
    "hello": 'print("hi")\n',
    "one process": (
        "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.ones(2)).sum().backward()\n"
    ),
    "a launcher": (
        "import torch.distributed as dist\nfrom elsewhere import"
        " main\ndist.init_process_group()\nmain()\n"
    ),
}


@pytest.mark.parametrize("kind", NO_TRAINING)
def test_without_training_nothing_was_checked(
    report: Report, command: Command, tmp_path: Path, kind: str
) -> None:
    script = written(tmp_path, NO_TRAINING[kind], "hello.py")
    for given in (script, tmp_path):
        code, made = report(given)
        assert (code, made["verdict"], made["facts"]["sources"]["without_training"]) == (
            4,
            "inconclusive",
            1,
        )
        assert made["facts"]["sources"]["files_without_training"] == [str(script)]
        code, made = report(given, "--allow-no-training")
        assert (code, made["verdict"]) == (0, "no_findings")
    code, made = report(script, RIGHT)
    assert (code, made["verdict"], made["facts"]["sources"]["without_training"]) == (
        0,
        "no_findings",
        1,
    )
    assert command("verify", script, "--tier", "static", "--json").data["verdict"] == "inconclusive"


@pytest.mark.parametrize("name", ["text", "json", "junit", "sarif", "github", "html"])
def test_no_format_says_pass(command: Command, tmp_path: Path, name: str) -> None:
    script, report = (
        written(tmp_path, NO_TRAINING["hello"]),
        ("--report", f"{name}={tmp_path / 'out'}"),
    )
    for path, code in ((script, 4), (RIGHT, 0)):
        for words, status in ((("lint", path), code), (("verify", path, "--tier", "static"), 4)):
            command(*words, *report, code=status)
            text = (tmp_path / "out").read_text()
            if name == "json":
                data = json.loads(text)
                assert data["verdict"] != "pass" and data.pop("counts")["pass"] == 0
                text = json.dumps(data)
            assert not re.search(
                r"\b(?:pass|passed)\b", text.partition("</style>")[2] or text, re.IGNORECASE
            )


def test_pre_commit_gives_files_without_training() -> None:
    assert "lint --allow-no-training" in (TESTS.parent / ".pre-commit-hooks.yaml").read_text()


def test_json_follows_the_schema(run: Command, report: Report, tmp_path: Path) -> None:
    code, made = report(LATE, RIGHT)
    assert (code, made["verdict"], made["runs"]) == (1, "fail", [])
    (finding,) = made["findings"]
    assert (finding["rule"], finding["tier"], finding["location"]["line"]) == (
        "optim-before-shard",
        "static",
        67,
    )
    code, out, _ = run(
        LATE, "--report", f"json={tmp_path / 'new' / 'out.json'}", "--report", "text"
    )
    assert code == 1 and "FAIL optim-before-shard" in out
    jsonschema.validate(json.loads((tmp_path / "new" / "out.json").read_text()), REPORT)


def test_the_output_is_bounded(run: Command) -> None:
    code, out, _ = run(*sorted((TESTS / "faults").glob("*.py")))
    assert code == 1
    assert len(out) < 10_500 and "(cut; --report json=PATH has all)" in out


def test_a_folder_is_sorted_and_environments_are_left_out(run: Command, tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a/z.py",
        ".hidden/x.py",
        "env/lib/x.py",
        "__pycache__/x.py",
        "node_modules/x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LATE.read_text())
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    code, out, _ = run(tmp_path, "--json")
    files = [
        Path(f["location"]["file"]).relative_to(tmp_path).as_posix()
        for f in json.loads(out)["findings"]
    ]
    assert (code, files) == (1, ["a/z.py", "b.py"])


SELECTED = [("--only", "optim-before-shard"), ("--only", "optimizer"), ("--only", "wrapping")]
SELECTED += [("--skip", "optim-before-shard")]


@cases(
    "words, message",
    (["nowhere.py"], "nowhere.py: no such file or folder"),
    (["{empty}"], "no Python file in this folder"),
    (["{text}"], "notes.txt:1:7: this is not Python: invalid syntax"),
    (["{binary}"], "b.py:1:1: this is not Python"),
    (["{right}", "--only", "no-such-rule"], "unknown rule or family 'no-such-rule'"),
    (["{right}", "--only", "matches-ddp"], "'matches-ddp' cannot be seen in sources alone"),
    (["{right}", "--report", "xml"], "unknown format 'xml'"),
    (["{right}", "--report", "json="], "a path is missing after '='"),
    (["{right}", "--json", "--report", "text"], "two reports cannot both go to stdout"),
    (["{right}", "--report", "json={text}/x"], "cannot be written"),
    (["{right}", "--", "--x"], "only verify, plan and guard take arguments after `--`"),
)
def test_bad_usage(run: Command, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("plain old prose\n")
    (tmp_path / "b.py").write_bytes(b"\x00\xff\xfe")
    names = {
        "empty": tmp_path / "empty",
        "text": tmp_path / "notes.txt",
        "binary": tmp_path / "b.py",
        "right": RIGHT,
    }
    code, out, err = run(*[word.format(**names) for word in words])
    assert (code, out) == (2, "")
    assert message in err


def test_no_path_and_a_file_that_cannot_be_read(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(code=2)
    path = written(tmp_path, "x = 1\n")
    refused = PermissionError(errno.EACCES, "Permission denied")  # permissions do not stop root
    monkeypatch.setattr(inputs, "whole", mock.Mock(side_effect=refused))
    code, _, err = run(path)
    assert code == 2 and "cannot be read: Permission denied" in err


def test_a_loop_of_links_cannot_be_read(run: Command, tmp_path: Path) -> None:
    (tmp_path / "sub.py").mkdir()
    code, _, err = run(tmp_path / "sub.py")
    assert code == 2 and "no Python file" in err
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    code, _, err = run(tmp_path)
    assert code == 2 and "loop.py: cannot be read" in err


@cases(
    "words",
    [RIGHT],
    [LATE],
    ["--migrate", TESTS / "migrate" / "fsdp1_trainer.py"],
    ids=["right", "fault", "migrate"],
)
def test_nothing_heavy_is_imported(words: list[object]) -> None:
    done = python("-X", "importtime", "-m", "verified_fsdp2.skill", "lint", *words, status=None)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "verified_fsdp2.verifier.source.lint" in imported
    assert ("verified_fsdp2.verifier.source.migration_loop" in imported) is ("--migrate" in words)
    heavy = {
        "torch",
        "numpy",
        "jsonschema",
        "yaml",
        "jinja2",
        "subprocess",
        "socket",
        "tempfile",
        "shutil",
    }
    assert imported & heavy == set()


def test_verify_at_the_static_tier(command: Command) -> None:
    out = command("verify", str(LATE), "--tier", "static", code=1).out
    assert "FAIL optim-before-shard" in out and "verdict: fail" in out
    report = command("verify", str(RIGHT), "--tier", "static", "--json", code=4).data
    jsonschema.validate(report, REPORT)
    assert (report["verdict"], report["tier"], report["findings"]) == ("no_findings", "static", [])
    assert report["target"]["command"].endswith(" --tier static")
    assert "optim-before-shard" in report["facts"]["sources"]["rules"]


def test_what_the_reference_says(run: Command, command: Command, tmp_path: Path) -> None:
    text = (TESTS.parent / "references" / "reliability.md").read_text(encoding="utf-8")
    section = text.partition("## The static tier")[2].partition("\n## ")[0]
    comment = next(
        line.partition("#")[2] for line in section.splitlines() if "ignore[root-only-wrap]" in line
    )
    source = (TESTS / "faults" / "root_only_wrap.py").read_text(encoding="utf-8")
    script = written(tmp_path, source)
    assert "WARNING root-only-wrap" in run(script)[1]
    lines = [
        f"{line}  #{comment}" if "fully_shard(GPT()" in line else line
        for line in source.splitlines()
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    assert "WARNING" not in run(script)[1]
    static = command("verify", script, "--tier", "static", "--json", code=4).data
    (one,) = static["facts"]["sources"]["suppressed"]
    assert one["rule"] == "root-only-wrap" and one["reason"] in comment

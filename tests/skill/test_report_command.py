"""`fsdp2 report`: what it keeps of a finding, and what it leaves out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import cases
from scripts import Command
from verdicts import verdict
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import json_report
from verified_fsdp2.verifier.trace.events import Place

LINE = Place(file="/home/someone/secret/train.py", line=7, function="main", code="key = 'abc'")
WRONG = Finding(
    "matches-ddp",
    "fail",
    "differs at /home/someone/secret/train.py:7",
    measured=0.5,
    limit=0.1,
    location=LINE,
)
OTHER = replace(WRONG, rule="root-not-wrapped")


def written(folder: Path) -> Path:
    made = verdict(WRONG, OTHER, root="/home/someone/secret", args="--token abc --size=5")
    run = {
        "role": "train",
        "world_size": 2,
        "completed": True,
        "seconds": 1.0,
        "note": "",
        "exit": {},
        "losses": [1.0],
        "grad_norms": [2.0],
        "command": "train.py --token abc",
    }
    path = folder / "report.json"
    path.write_text(json_report.render(replace(made, runs=[run])))
    return path


def test_what_a_consequence_would_have_been_alone(command: Command, tmp_path: Path) -> None:
    effect = replace(WRONG, consequence=True, fix="Look at the first parameter.")
    cause = Finding("optim-before-shard", "fail", "built early")
    path = tmp_path / "report.json"
    path.write_text(json_report.render(verdict(effect, cause, Finding("grad-reset", "pass", "x"))))
    given = ("--report", str(path))
    out = command("explain", "matches-ddp", *given).out
    assert out.startswith(
        "reported as a consequence of optim-before-shard; alone it would be:\nFAIL"
    )
    assert all(part in out for part in (WRONG.evidence, ":7 in main", "fix  Look at the first"))
    assert "consequence" not in command("explain", "optim-before-shard", *given).out
    items = command("explain", "matches-ddp", *given, "--json").data
    assert [item["measured"] for item in items] == [0.5]
    assert "no finding of 'matches-single-process'" in (
        command("explain", "matches-single-process", *given, code=2).err
    )
    assert "name the rule" in command("explain", *given, code=2).err


def test_it_keeps_the_finding_and_leaves_out_what_is_the_users(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "finding.json"
    done = command("report", "matches-ddp", str(written(tmp_path)), "--out", str(out))
    assert out.read_text() == done.out
    found = json.loads(done.out)
    assert (found["finding"]["measured"], found["finding"]["line"], found["other_failures"]) == (
        0.5,
        7,
        ["root-not-wrapped"],
    )
    assert found["options"] == ["--size", "--token"] and found["runs"][0]["losses"] == [1.0]
    assert not any(word in done.out for word in ("secret", "someone", "abc", "key ="))
    command("report", "matches-ddp", str(tmp_path / "report.json"), "--out", str(out), code=2)


@cases(
    "text",
    *(
        "{",
        "[]",
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        '{"schema": 2}',
    ),
    ids=["cut", "a list", "nested lists", "nested objects", "of the right version"],
)
def test_what_is_no_report(text: str, command: Command, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(text)
    assert str(path) in command("report", "matches-ddp", path, code=2).err


@cases(
    "part",
    {"target": []},
    {"runs": [1, 2]},
    {"findings": [{"rule": "matches-ddp", "location": "x"}]},
    {"schema": 1, "runs": [1, 2]},
    {"schema": 1, "environment": 1},
    ids=lambda part: " ".join(part),
)
def test_a_report_of_other_types(part: dict[str, Any], command: Command, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **part}))
    assert str(path) in command("report", "matches-ddp", path, code=2).err


def test_a_rule_without_a_finding_and_a_file_that_is_not_there(
    command: Command, tmp_path: Path
) -> None:
    assert "'matches-ddp'" in command("report", "matches-dd", written(tmp_path), code=2).err
    command("report", "matches-ddp", tmp_path / "none", code=2)

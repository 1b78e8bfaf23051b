"""No report holds a credential, wherever in a verdict it stands; what holds none is left as it
is.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from records import cases
from verdicts import valid, verdict
from verified_fsdp2.verifier import pipeline
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import RENDERERS, baseline, github, renderers
from verified_fsdp2.verifier.report.bundle import bundle
from verified_fsdp2.verifier.report.json_report import as_dict
from verified_fsdp2.verifier.report.redacted import given_secrets, redacted
from verified_fsdp2.verifier.rules.lint import lint
from verified_fsdp2.verifier.trace.events import Line, Place
from verified_fsdp2.verifier.verdict import Verdict

ROOT = Path(__file__).parents[2]
SECRET = "Planted7Secret"
FORMS = [
    f"--hub-token {SECRET}",
    f"HF_TOKEN={SECRET}",
    f"https://me:{SECRET}@host/a",
    f"ValueError: {{'password': '{SECRET}'}}",
]
SCRIPT = f"""\
import torch
from torch.distributed.fsdp import fully_shard

def main():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1); login(token="{SECRET}")
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

main()
"""


def planted(text: str) -> Verdict:
    """A verdict with this text in every field that holds one."""
    line = Line(file=f"/a/{text}.py", line=3, function=text, code=text)
    place = Place(file="/a/repo/train.py", line=7, function=text, code=text)
    place = replace(place, library=line, through=[line], callers=[line])
    failed = Finding("matches-ddp", "fail", text, 2.0, 1.0, place, text)
    found = [failed, replace(failed, required=False), replace(failed, consequence=True)]
    found += [
        replace(failed, status=status)
        for status in ("error", "inconclusive", "pass", "not_applicable")
    ]
    names = (
        "name",
        "command",
        "script",
        "module",
        "cwd",
        "device",
        "launcher",
        "args",
        "save_args",
    )
    target = dict.fromkeys(
        (*names, "resume_args", "single_args", "reshard_args", "reference"), text
    )
    made = verdict(*found, **target)
    environment = {**made.environment, "platform": text, "notes": [text], "HF_TOKEN": SECRET}
    run = {"role": "train", "world_size": 2, "completed": False, "command": text, "note": text}
    run |= {"seconds": 1.0, "exit": {"0": 1}, "losses": [1.0], "grad_norms": [1.0]}
    lines = [{"file": "/a/b.py", "first": 1, "last": 2, "code": text, "after_step": None}]
    facts = {"horizon": {"steps": 1, "ended": False, "seconds": 1.0, "lines": lines}}
    skipped = [{"rule": "matches-ddp", "reason": text, "until": text}]
    made = replace(made, environment=environment, runs=[run], facts=facts, skipped=skipped)
    made = replace(made, folder=text, refused=text, suggestion=text)
    gone = tuple(made.findings[:1])
    held = baseline.Comparison(text, gone, (), gone, gone)
    return replace(made, baseline=held)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts(part))


@cases("form", *FORMS, ids=["option", "environment", "url", "exception"])
def test_no_report_holds_it(form: str) -> None:
    made = planted(form)
    assert SECRET in RENDERERS["json"](made)
    safe = redacted(made)
    reports = {name: render(safe) for name, render in RENDERERS.items()}
    reports |= {f"{name} -v": render(safe) for name, render in renderers(verbose=True).items()}
    reports["summary"] = github.summary(safe)
    reports["bundle"] = json.dumps(
        bundle(json.loads(reports["json"]), as_dict(safe)["findings"][0])
    )
    assert [name for name, text in reports.items() if SECRET in "".join(text.split())] == []
    assert [name for name, text in reports.items() if "***" not in text] == []
    valid("sarif", reports["sarif"])
    valid("junit", reports["junit"])


def test_the_bundle_redacts_a_report_of_an_earlier_version() -> None:
    report = json.loads(RENDERERS["json"](planted(FORMS[1])))
    assert SECRET not in json.dumps(bundle(report, report["findings"][0]))


def test_the_command_to_run_again_is_one() -> None:
    made = verdict(
        Finding("a", "fail", "b"), command="fsdp2 verify a.py -- --hub-token 'a b' --steps 5"
    )
    assert "-- --hub-token '***' --steps 5" in RENDERERS["text"](redacted(made))


def test_what_holds_none_is_the_same_object() -> None:
    made = verdict(
        Finding(
            "a", "fail", "b: 1.5", location=Place(file="a.py", line=1, function="", code="x = 1")
        )
    )
    assert redacted(made) is made


def test_words_of_a_command_and_records_in_records() -> None:
    assert redacted(["--hub-token", "abc", "--steps", "5"]) == [
        "--hub-token",
        "***",
        "--steps",
        "5",
    ]
    assert redacted(("--hub-token", "--steps")) == ("--hub-token", "--steps")
    assert redacted({"env": {"HF_TOKEN": "abc", "N": 1}}) == {"env": {"HF_TOKEN": "***", "N": 1}}


def test_a_credential_on_the_command_line_is_one_everywhere() -> None:
    lines = {
        "args": f"--hub-token {SECRET} --steps 500000",
        "save_args": "--api-key='a b c d' hub.token=abc1def2",
    }
    lines |= {
        "command": "fsdp2 verify a.py --save-args '--password hunter22 --out /tmp/a'",
        "resume_args": "'",
    }
    assert set(given_secrets(lines)) == {SECRET, "a b c d", "abc1def2", "hunter22"}
    made = verdict(Finding("a", "fail", f"rank 1 raised HTTPError: 401 for {SECRET}"), **lines)
    assert (
        redacted(made, given_secrets(lines)).findings[0].evidence
        == "rank 1 raised HTTPError: 401 for ***"
    )


def test_what_fsdp2_returns_is_redacted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    args = ["--hub-token", SECRET]
    verified = pipeline.verify(resolve(script, {"args": args}), tmp_path / "work", tier="static")
    linted = lint([script])
    for made in (verified, linted):
        found, *_ = [f for f in made.findings if f.rule == "optim-before-shard"]
        assert found.location is not None and 'login(token="***")' in found.location.code
        assert SECRET not in repr(made)


def test_a_line_that_holds_one_is_known_from_the_baseline(tmp_path: Path) -> None:
    script, old = tmp_path / "train.py", tmp_path / "old.json"
    script.write_text(SCRIPT)
    made = lint([script])
    report = json.loads(RENDERERS["json"](made))
    old.write_text(json.dumps(report).replace("***", SECRET))  # of a version that wrote it
    held = baseline.held_against(made, old, baseline.load(old)).baseline
    assert held is not None and len(held.standing) == len(made.findings) > 0 == len(held.new)


def test_progress_is_redacted() -> None:
    seen: list[tuple[str, list[str]]] = []
    report = pipeline._without((SECRET,), lambda line, going: seen.append((line, list(going))))
    report(FORMS[0], [f"refused {SECRET}"])
    assert seen == [("--hub-token ***", ["refused ***"])]


def test_the_log_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    from verified_fsdp2.skill.output import log

    log(FORMS[2])
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem
)
def test_recorded_findings_stay_as_they_are(path: Path) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert [text for text in texts(recorded) if redacted(text) != text] == []


def test_lines_of_right_scripts_stay_as_they_are() -> None:
    paths = [
        path for folder in ("zoo", "faults") for path in (ROOT / "tests" / folder).rglob("*.py")
    ]
    lines = {line for path in paths for line in path.read_text(encoding="utf-8").splitlines()}
    assert len(lines) > 1000
    assert [line for line in lines if redacted(line) != line] == []

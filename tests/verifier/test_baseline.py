"""A verdict held against an earlier report: what counts as the same fault, and what is no
baseline.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from records import cases
from scripts import written
from verdicts import REPORT, verdict
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import RENDERERS, baseline, json_report
from verified_fsdp2.verifier.trace.events import Line, Place
from verified_fsdp2.verifier.verdict import Comparison

OLD = Path("old.json")


def place(
    file: str = "/a/repo/train.py", line: int = 7, function: str = "main", code: str = "x = 1"
) -> Place:
    return Place(file=file, line=line, function=function, code=code)


def report(*findings: Finding, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(json_report.as_dict(verdict(*findings, **more))))  # type: ignore[no-any-return]


def compare(
    now: Sequence[Finding], before: Sequence[Finding], looked_for: Sequence[str] = ()
) -> Comparison:
    """`looked_for`: rules of a static tier, which reports none as passed."""
    made = replace(verdict(*now), facts={"sources": {"rules": looked_for}} if looked_for else {})
    return baseline.held_against(made, OLD, report(*before)).baseline


FAULT = Finding("optim-before-shard", "fail", "built in line 7", location=place())


def test_only_what_is_new_fails() -> None:
    for status, code in (("pass", 0), ("fail", 1), ("inconclusive", 4), ("error", 3)):
        beside = Finding("b", status, "")
        old = report(FAULT, beside) if status == "error" else report(FAULT)
        made = baseline.held_against(verdict(FAULT, beside), OLD, old)
        assert (made.verdict, made.answer, made.exit_code) == ("fail", status, code)
    assert verdict(FAULT).exit_code == 1


def test_a_fault_in_a_library_is_known_by_the_users_line() -> None:
    inner = Line(file="/env/site-packages/trainer.py", line=90, function="step", code="clip(p)")
    inside = replace(FAULT, location=replace(place(), library=inner))
    assert report(inside)["findings"][0]["location"] == {
        **inner.to_json(),
        "from": place().to_json(),
    }
    longer = replace(
        inside, location=replace(inside.location, through=[replace(inner, line=7)], callers=[inner])
    )
    whole = report(longer)
    jsonschema.validate(whole, REPORT)
    (held,) = whole["findings"]
    assert baseline.finding_of(held) == longer
    assert vars(baseline.finding_of(held).location) == vars(longer.location)
    assert compare([inside], [FAULT]).standing == (inside,)
    assert compare([FAULT], [inside]).standing == (FAULT,)
    text = RENDERERS["text"](verdict(inside))
    assert (
        text.index("trainer.py:90 in step") < text.index("from ") < text.index("train.py:7 in main")
    )
    (result,) = json.loads(RENDERERS["sarif"](verdict(inside)))["runs"][0]["results"]
    (plain,) = json.loads(RENDERERS["sarif"](verdict(FAULT)))["runs"][0]["results"]
    assert result.pop("relatedLocations")[0]["physicalLocation"]["region"]["startLine"] == 90
    assert result == plain


def test_a_fault_is_known_by_its_place_without_the_line() -> None:
    moved = replace(FAULT, evidence="built in line 90", location=place(line=90), measured=3.0)
    assert compare([moved], [FAULT]).standing == (moved,)
    for other in (
        replace(FAULT, rule="other"),
        replace(FAULT, location=place(file="/a/repo/model.py")),
        replace(FAULT, location=place(function="build")),
        replace(FAULT, location=place(code="x = 2")),
        replace(FAULT, location=None),
    ):
        assert compare([other], [FAULT]).new == (other,), other


def test_a_second_fault_of_the_same_look_is_new() -> None:
    twin = replace(FAULT, location=place(line=9))
    held = compare([FAULT, twin], [FAULT])
    assert (len(held.standing), len(held.new)) == (1, 1)
    assert len(compare([FAULT], [FAULT, twin]).gone) == 1


def test_gone_is_what_was_judged_again() -> None:
    for status in ("pass", "not_applicable"):
        assert compare([Finding("optim-before-shard", status, "")], [FAULT]).gone == (FAULT,)
    for now in ([], [Finding("optim-before-shard", "inconclusive", "")]):
        held = compare(now, [FAULT])
        assert (held.gone, held.unjudged) == ((), (FAULT,))
    assert compare([], [FAULT], looked_for=["optim-before-shard"]).gone == (FAULT,)


def test_a_report_of_schema_1_is_read(tmp_path: Path) -> None:
    """As an earlier version wrote it: no tier, no limits, no counts, other names of roles."""
    old = report(FAULT, Finding("b", "inconclusive", "undecided"))
    for name in ("tier", "limits", "counts"):
        del old[name]
    run = {"role": "envelope", "world_size": 2, "seconds": 1.0, "completed": True, "exit": {}}
    old |= {
        "schema": 1,
        "runs": [{**run, "command": "", "note": "", "losses": [], "grad_norms": []}],
    }
    path = written(tmp_path, json.dumps(old), "old.json")
    held = baseline.held_against(
        verdict(FAULT, Finding("c", "fail", "")), path, baseline.load(path)
    ).baseline
    assert ([f.rule for f in held.standing], [f.rule for f in held.new]) == (
        ["optim-before-shard"],
        ["c"],
    )


@cases("version", 1, 2)
def test_a_report_of_an_earlier_version_is_a_baseline(version: int) -> None:
    """Each is the first, or the last, that a version of the schema wrote, by a real run."""
    path = Path(__file__).parent / "reports" / f"schema{version}.json"
    old = baseline.load(path)
    (known,) = [f for f in map(baseline.finding_of, old["findings"]) if f.status == "fail"]
    assert known.rule == "optim-before-shard" and known.location is not None
    here = replace(verdict(known), target={**verdict().target, "script": "/tmp/bl2/train.py"})
    assert baseline.held_against(here, path, old).answer == "pass"


def test_fields_that_a_report_gains_or_loses_refuse_no_baseline(tmp_path: Path) -> None:
    """What is added to the schema must leave the baselines that users have stored."""
    old = report(FAULT)
    needed = {"rule", "status", "evidence", "location"}
    for finding in old["findings"]:
        for name in finding.keys() - needed:
            del finding[name]
        finding["from_the_future"] = {"a": 1}
        finding["location"]["column"] = 3
    old = {name: old[name] for name in ("schema", "target", "findings")} | {"new": []}
    path = written(tmp_path, json.dumps(old), "old.json")
    assert baseline.held_against(verdict(FAULT), path, baseline.load(path)).answer == "pass"


def test_another_checkout_and_another_environment_are_the_same_place() -> None:
    library = Finding("a", "fail", "", location=place("/venv/lib/site-packages/peft/x.py"))
    old = report(
        replace(FAULT, location=place("/b/clone/train.py")),
        replace(library, location=place("/opt/site-packages/peft/x.py")),
        root="/b/clone",
    )
    now = verdict(FAULT, library)
    baseline.must_be_of(OLD, old, now.target)
    assert baseline.held_against(now, OLD, old).answer == "pass"


@cases(
    "other",
    {"command": "fsdp2 verify other.py", "script": "/b/other.py"},
    {"command": "fsdp2 verify my-run", "script": "/b/my-run/train.py"},
    {"command": "fsdp2 verify -m train", "script": "/b/train.py", "module": "train"},
    {"command": "fsdp2 lint train.py", "script": "train.py", "files": 1},
)
def test_another_target_is_wrong_usage(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--baseline old.json: .* verify train.py"):
        baseline.must_be_of(OLD, report(**other), verdict().target)


@cases(
    "content, message",
    (b"", "old.json:1:1: not JSON"),
    (b'{\n "schema": 1\nx}', "old.json:3:1: not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[]", "not a report of fsdp2"),
    (b'{"version": "2.1.0"}', "not a report of fsdp2"),
    (b'{"schema": 99}', "schema version 99"),
    (b'{"schema": true}', "not a report of fsdp2"),
    (b'{"schema": 2, "findings": 3}', "not a report of fsdp2"),
    (b'{"schema": 1, "findings": 3}', "not a report of fsdp2"),
)
def test_what_is_no_baseline(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        baseline.load(path)
    assert message in str(caught.value) and "--report json=PATH" in str(caught.value)


def test_a_baseline_must_be_there(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.json", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=message):
            baseline.load(path)


def test_odd_values_of_a_report_do_not_stop_it(tmp_path: Path) -> None:
    odd = report(
        replace(FAULT, location=place(file="", line=-1, code="\ud800")), command="it's", script=""
    )
    path = written(tmp_path, json.dumps(odd), "old.json")
    baseline.name_of(baseline.load(path)["target"])
    gone = report(
        Finding(
            "a", "fail", "\ud800", location=place(file="", code="\ud800"), measured=1e308, limit=0.0
        )
    )
    held = baseline.held_against(verdict(Finding("a", "pass", "")), OLD, gone)
    for name, render in RENDERERS.items():
        assert render(held).encode("utf-8"), name

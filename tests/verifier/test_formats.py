"""JUnit, SARIF and GitHub: valid against the schemas of others, honest about what is open, and safe
from what a script prints.
"""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import verdicts
from records import Patch
from verdicts import valid
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import LINT, RENDERERS, github, json_report, renderers
from verified_fsdp2.verifier.report.baseline import held_against
from verified_fsdp2.verifier.report.sanitize import sanitize
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Verdict

REASON, ABSENT = "how this script resumes is not known", "the script saves no checkpoint"
HOSTILE = (
    "x\n::error::forged\n \t::warning::too ##[error]and \x1b[2J\x00\r::notice::me & <b> ]]> \u202e"
    " \ud800 \u2028 100% a,b:c"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    return tmp_path


def place(line: int = 7, file: str = "train.py", code: str = "opt = AdamW(...)") -> Place:
    return Place(file=str(Path.cwd() / file), line=line, function="main", code=code)


def verdict(*findings: Finding, **target: str) -> Verdict:
    return verdicts.verdict(*findings, root=Path.cwd(), **target)


COUNTS = ("tests", "failures", "errors", "skipped")


def four() -> Verdict:
    return verdict(
        Finding("optim-before-shard", "fail", "built early", location=place(), fix="move it"),
        Finding("matches-ddp", "fail", "differs", measured=0.15, limit=4e-6, consequence=True),
        Finding("resume-is-exact", "inconclusive", REASON),
        Finding("root-not-wrapped", "pass", "fine", measured=float("nan"), limit=1.0),
    )


def junit(made: Verdict) -> ET.Element:
    return ET.fromstring(valid("junit", RENDERERS["junit"](made)))


def by_name(suite: ET.Element) -> dict[str | None, Any]:
    return {case.get("name"): case for case in suite.iter("testcase")}


def sarif(made: Verdict) -> dict[str, Any]:
    (run,) = json.loads(valid("sarif", RENDERERS["sarif"](made)))["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return run


def test_junit_shows_what_is_open_as_an_error() -> None:
    suite = junit(four())[0]
    assert [suite.get(key) for key in COUNTS] == ["4", "2", "1", "0"]
    cases = by_name(suite)
    assert cases["optim-before-shard"].get("classname") == "fsdp2.optimizer"
    said = cases["optim-before-shard"].find("failure").text
    parts = (
        "built early",
        "at train.py:7 in main",
        "opt = AdamW(...)",
        "fix: move it",
        "fsdp2 explain",
    )
    assert [part for part in parts if part not in said] == []
    assert cases["resume-is-exact"].find("error").get("message") == f"not checked: {REASON}"
    assert cases["matches-ddp"].find("failure").get("type") == "consequence"
    assert [child.tag for child in cases["root-not-wrapped"]] == ["system-out"]
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert (
        properties["matches-ddp.measured"] == "0.15" and properties["matches-ddp.limit"] == "4e-06"
    )


def test_junit_of_lint_names_places_and_is_never_empty() -> None:
    hit = Finding("optim-before-shard", "fail", "x", location=place(), tier="static")
    made = verdict(hit, replace(hit, location=place(line=9)))
    made.target["files"] = 1
    text = valid("junit", LINT["junit"](made))
    names = [case.get("name") for case in ET.fromstring(text).iter("testcase")]
    assert names == [
        "optim-before-shard in train.py main",
        "optim-before-shard in train.py main (2)",
    ]
    none = verdict()
    none.target["files"] = 3
    (case,) = junit(none).iter("testcase")
    assert case.find("skipped") is not None, "no findings is no pass"


def test_sarif_has_rules_regions_and_relative_paths() -> None:
    moved, other = place(file="a folder/tr\u00e4in.py"), place(file="../lib/other.py")
    made = verdict(
        Finding("optim-before-shard", "fail", "built early", location=moved, fix="move"),
        Finding("matches-ddp", "fail", "differs", consequence=True, location=other),
        Finding("resume-is-exact", "inconclusive", "not known"),
        Finding("root-not-wrapped", "pass", "fine"),
    )
    run = sarif(made)
    first, second, third = run["results"]
    physical = first["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {
        "uri": "a%20folder/tr%C3%A4in.py",
        "uriBaseId": "SRCROOT",
    }
    assert physical["region"] == {"startLine": 7, "snippet": {"text": "opt = AdamW(...)"}}
    kinds = [(r["kind"], r["level"]) for r in run["results"]]
    assert kinds == [("fail", "error"), ("fail", "warning"), ("open", "none")]
    assert second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith(
        "file:///"
    )
    assert third["locations"][0]["physicalLocation"]["region"]["startLine"] == 1
    rule = run["tool"]["driver"]["rules"][0]
    assert "**Why.**" in rule["help"]["markdown"] and rule["help"]["text"]
    assert (
        run["invocations"][0]["exitCode"] == 1
        and run["invocations"][0]["executionSuccessful"] is True
    )
    assert "baselineState" not in first


def test_sarif_fingerprints_survive_moved_lines_and_other_checkouts(
    here: Path, monkeypatch: Patch
) -> None:
    def prints(*findings: Finding) -> list[str]:
        return [
            next(iter(r["partialFingerprints"].values()))
            for r in sarif(verdict(*findings))["results"]
        ]

    one = Finding("optim-before-shard", "fail", "in line 7", location=place())
    before = prints(
        one, replace(one, rule="matches-ddp"), replace(one, location=place(code="other"))
    )
    assert len(set(before)) == 3
    (here / "clone").mkdir()
    monkeypatch.chdir(here / "clone")
    assert (
        prints(Finding("optim-before-shard", "fail", "in line 9", location=place(line=9)))
        == before[:1]
    )


def test_paths_are_those_of_the_checkout(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sub").mkdir()
    made = four()
    monkeypatch.chdir(here / "sub")
    assert "uriBaseId" not in json.dumps(sarif(made)["results"])
    monkeypatch.setenv("GITHUB_WORKSPACE", str(here))
    assert (
        sarif(made)["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        == "train.py"
    )
    assert RENDERERS["github"](made).startswith("::error file=train.py,line=7,title=")


def test_the_baseline_in_every_format() -> None:
    old = replace(four(), findings=[four().findings[0], Finding("root-not-wrapped", "fail", "x")])
    made = held_against(four(), Path("old.json"), json_report.as_dict(old))
    assert (made.verdict, made.answer) == ("fail", "fail")
    cases = by_name(junit(made))
    assert "old.json" in cases["optim-before-shard"].find("skipped").get("message")
    assert cases["matches-ddp"].find("failure") is not None
    assert {r["ruleId"]: (r["baselineState"], r["kind"]) for r in sarif(made)["results"]} == {
        "optim-before-shard": ("unchanged", "fail"),
        "matches-ddp": ("new", "fail"),
        "resume-is-exact": ("new", "open"),
        "root-not-wrapped": ("absent", "pass"),
    }
    commands = [line for line in RENDERERS["github"](made).splitlines() if line.startswith("::")]
    assert [line.split()[0] for line in commands] == ["::warning", "::warning", "::notice"]
    last = " ".join(RENDERERS["text"](made).split("verdict: fail")[-1].split())
    assert all(
        part in last for part in ("old.json: fail", "1 new (matches-ddp)", "(optim-before-shard)")
    )
    assert last.endswith("1 gone (root-not-wrapped)")
    report = json.loads(valid("json", RENDERERS["json"](made)))
    assert [item["rule"] for item in report["baseline"]["standing"]] == ["optim-before-shard"]
    known = "`optim-before-shard` known"
    assert known not in github.summary(four()) and known in github.summary(made)


def test_github_escapes_and_counts() -> None:
    hostile = verdict(Finding("a-rule", "fail", "50%,\n::x:\r", location=place(file="a,b:c.py")))
    first, *_ = RENDERERS["github"](hostile).splitlines()
    assert (
        first == "::error file=a%2Cb%3Ac.py,line=7,title=fsdp2%3A a-rule::50%25,%0A::x:%0D%0Afsdp2"
        " explain a-rule"
    )
    many = [
        Finding(f"rule-{k}", "fail", "x", location=place(k + 1), consequence=k < 20)
        for k in range(30)
    ]
    made = verdict(*many, *(Finding(f"open-{k}", "inconclusive", "one reason") for k in range(5)))
    lines = RENDERERS["github"](made).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert len(commands) == 10 and all(line.startswith("::error") for line in commands), (
        "the worst come first"
    )
    assert lines[10].startswith("21 more ")
    summary = github.summary(made)
    assert (
        all(f"`rule-{k}`" in summary for k in range(30)) and summary.count("### Not checked") == 1
    )


def test_the_summary_is_cut_below_its_limit_and_says_so() -> None:
    made = verdict(*(Finding(f"rule-{k}", "fail", "\u00e4" * 10_000) for k in range(100)))
    summary = github.summary(made)
    assert 900_000 < len(summary.encode()) <= github.SUMMARY < 1024 * 1024
    assert "`--report json=PATH`" in summary[-99:]
    assert summary.count("```") % 2 == 0
    assert github.summary(made, 10) == ""


def parsed_by_a_runner(text: str) -> list[str]:
    """The lines that GitHub's runner would take for commands: its two forms, over every line end
    that it knows.
    """
    lines = re.split(r"\r\n|\r|\n|\x0b|\x0c|\x85|\u2028|\u2029", text)
    return [line for line in lines if re.match(r"\s*::", line) or re.search(r"##\w*\[", line)]


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_what_a_script_says_is_no_command(name: str) -> None:
    hostile = verdict(
        Finding("optim-before-shard", "fail", HOSTILE, location=place(code=HOSTILE), fix=HOSTILE),
        Finding("matches-ddp", "inconclusive", HOSTILE),
        Finding("root-not-wrapped", "pass", HOSTILE),
        command=HOSTILE,
    )
    text = RENDERERS[name](hostile)
    commands = parsed_by_a_runner(text)
    if name == "github":
        assert [line.split()[0] for line in commands] == ["::error", "::warning"], "ours alone"
        assert parsed_by_a_runner(github.summary(hostile)) == []
    else:
        assert commands == []
    assert "\x1b" not in text and "\x00" not in text
    text.encode("utf-8")
    if name == "json":
        assert json.loads(text)["findings"][0]["evidence"] == HOSTILE
    valid(name, text)


def test_harmless_leaves_other_text_alone() -> None:
    text = "x[::2] a::b\n    y = x[:: 2]  # 100%\n## [a]\n\ttab \u00e4\n"
    assert sanitize(text) == text


def test_a_code_block_of_the_summary_cannot_be_ended() -> None:
    summary = github.summary(verdict(Finding("a-rule", "fail", "```\n# forged\n````")))
    assert "`````text\n```\n# forged\n````\n" in summary


def inapplicable() -> Verdict:
    return verdict(
        Finding("root-not-wrapped", "pass", "fine"),
        Finding("resume-is-exact", "not_applicable", ABSENT),
        Finding("matches-original", "not_applicable", "converted from no other script"),
    )


def test_what_does_not_apply_is_no_obstacle_and_counted_apart() -> None:
    made = inapplicable()
    assert (made.verdict, made.exit_code) == ("pass", 0)
    report = json.loads(valid("json", RENDERERS["json"](made)))
    assert report["schema"] == 3
    assert report["counts"] == {
        "pass": 1,
        "fail": 0,
        "inconclusive": 0,
        "not_covered": 0,
        "not_applicable": 2,
        "error": 0,
        "warning": 0,
    }
    assert [f["status"] for f in report["findings"]] == ["pass", "not_applicable", "not_applicable"]
    lines = renderers(verbose=True)["text"](made).splitlines()
    assert any(line.startswith("1 passed, 2 not applicable, ") for line in lines)
    shown = [
        line.replace(":", "").split()[:2] for line in lines if line.startswith(("pass ", "n/a "))
    ]
    expected = (
        ["n/a", "matches-original"],
        ["n/a", "resume-is-exact"],
        ["pass", "root-not-wrapped"],
    )
    assert sorted(shown) == [*expected]


def test_what_does_not_apply_is_skipped_in_junit_and_no_result_in_sarif() -> None:
    """GitHub code scanning takes every result for a failure, whatever its `kind`."""
    suite, run = junit(inapplicable())[0], sarif(inapplicable())
    assert [suite.get(key) for key in COUNTS] == ["3", "0", "0", "2"]
    assert by_name(suite)["root-not-wrapped"].find("skipped") is None
    found = by_name(suite)["resume-is-exact"].find("skipped")
    assert (found.get("type"), found.get("message")) == (
        "not_applicable",
        f"not applicable: {ABSENT}",
    )
    assert run["results"] == [] and run["tool"]["driver"]["rules"] == []
    first, _ = run["properties"]["notApplicable"]
    assert first == {"rule": "resume-is-exact", "reason": ABSENT}


def test_what_does_not_apply_is_a_list_of_its_own_in_the_summary() -> None:
    assert github.commands(inapplicable()) == []
    parts = github.summary(inapplicable()).split("<details>")
    assert [
        "<summary>1 rule passed" in parts[1],
        "<summary>2 rules not applicable" in parts[2],
    ] == [True, True]
    assert "resume-is-exact" not in parts[1] and f"resume-is-exact: {ABSENT}" in parts[2]


def test_what_a_team_left_out_is_reported_and_fails_nothing() -> None:
    allowed = replace(four().findings[2], required=False)
    skips = ({"rule": "root-only-wrap", "reason": "two small layers", "until": "2027-03-31"},)
    made = replace(verdict(allowed, four().findings[3]), skipped=skips)
    assert made.verdict == "pass"
    cases = {name: case.find("skipped") for name, case in by_name(junit(made)).items()}
    assert {name: found.get("message") for name, found in cases.items() if found is not None} == {
        "resume-is-exact": f"not checked, and not required: {REASON}",
        "root-only-wrap": "skipped: two small layers (until 2027-03-31)",
    }
    assert [line.split(" ")[0] for line in github.commands(made)] == ["::notice"]
    assert "root-only-wrap: skipped: two small layers (until 2027-03-31)" in github.summary(made)
    assert sarif(made)["properties"]["skipped"] == list(skips)


def test_what_would_judge_more_is_in_every_text_for_people() -> None:
    made = replace(four(), suggestion="fsdp2 verify train.py --save-args '--save {checkpoint}'")
    assert "\nfsdp2 verify train.py --save-args '--save {checkpoint}'\n" in github.summary(made)
    assert "(not run): <code>fsdp2 verify train.py --save-args" in RENDERERS["html"](made)
    assert "    fsdp2 verify train.py --save-args" in RENDERERS["text"](made)

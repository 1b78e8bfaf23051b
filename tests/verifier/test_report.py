"""The renderers: valid against the schema, within an agent's patience, the verdict last."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from verified_fsdp2.verifier.finding import Finding, Status
from verified_fsdp2.verifier.report import RENDERERS, json_report
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Verdict, verdict_of

SCHEMA = json.loads((Path(json_report.__file__).parent / "report.schema.json").read_text())
PLACE = Place(file="/a/train.py", line=7, function="main", code="opt = AdamW(...)")


def verdict(*findings: Finding) -> Verdict:
    runs = [
        {
            "role": "train",
            "world_size": 2,
            "seconds": 1.0,
            "completed": True,
            "exit": {"0": 0},
            "command": "train.py",
            "note": "",
            "losses": [2.0, float("nan"), None],
            "grad_norms": [1.0, float("inf"), None],
        }
    ]
    target = {**dict.fromkeys(("script", "args", "save_args", "resume_args", "single_args"), ""), "reshard_to": []}
    target |= {"nproc": 2, "steps": 5}
    environment = {"torch": "2.13.0", "python": "3.11", "platform": "Linux"}
    return Verdict(verdict_of(findings), target, environment, runs, findings, {}, seconds=1.0)


def test_json_is_valid_and_finite() -> None:
    made = verdict(
        Finding("a-rule", "fail", "x", measured=float("nan"), limit=1.0, location=PLACE, fix="do"),
        Finding("b", "pass", "y"),
    )
    value = json.loads(RENDERERS["json"](made))
    jsonschema.validate(value, SCHEMA)
    assert value["runs"][0]["losses"] == [2.0, None, None]
    assert value["findings"][0]["measured"] is None


def test_text_says_what_where_and_how() -> None:
    text = RENDERERS["text"](
        verdict(Finding("a-rule", "fail", "it broke", location=PLACE, fix="fix it"), Finding("b", "pass", "fine"))
    )
    for part in (
        "FAIL a-rule",
        "it broke",
        "train.py:7 in main",
        "opt = AdamW(...)",
        "fix fix it",
        "fsdp2 explain a-rule",
    ):
        assert part in text
    assert text.rstrip().endswith("verdict: fail")


def test_a_consequence_is_told_in_one_line() -> None:
    text = RENDERERS["text"](
        verdict(Finding("cause", "fail", "x"), Finding("effect", "fail", "long story", consequence=True))
    )
    assert "as a consequence: effect" in text
    assert "effect: long story" in text


def test_text_has_a_bound() -> None:
    many = [Finding(f"rule-{k}", "fail", "word " * 100, location=PLACE, fix="fix " * 50) for k in range(60)]
    text = RENDERERS["text"](verdict(*many))
    assert len(text) < 10_000
    assert text.rstrip().endswith("verdict: fail")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["pass"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["inconclusive", "fail", "error"], "fail"),
        (["error", "pass"], "error"),
    ],
)
def test_verdict(statuses: list[Status], expected: str) -> None:
    assert verdict_of([Finding("r", status, "") for status in statuses]) == expected

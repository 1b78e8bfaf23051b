"""The renderers: valid against the schema, within an agent's patience, the verdict last."""

import json
from dataclasses import replace

import pytest

import verdicts
from records import cases
from verified_fsdp2.verifier.finding import Finding, Status
from verified_fsdp2.verifier.report import RENDERERS, renderers
from verified_fsdp2.verifier.report.github import summary
from verified_fsdp2.verifier.trace.events import Place
from verified_fsdp2.verifier.verdict import Verdict, verdict_of

PLACE = Place(file="/a/train.py", line=7, function="main", code="opt = AdamW(...)")


def verdict(*findings: Finding) -> Verdict:
    run = {
        "role": "train",
        "world_size": 2,
        "seconds": 1.0,
        "completed": True,
        "exit": {"0": 0},
        "command": "train.py",
    }
    numbers = {"losses": [2.0, float("nan"), None], "grad_norms": [1.0, float("inf"), None]}
    return replace(verdicts.verdict(*findings), runs=[{**run, "note": "", **numbers}])


def test_json_is_valid_and_finite() -> None:
    made = verdict(
        Finding("a-rule", "fail", "x", measured=float("nan"), limit=1.0, location=PLACE, fix="do"),
        Finding("b", "pass", "y"),
    )
    value = json.loads(verdicts.valid("json", RENDERERS["json"](made)))
    assert (value["runs"][0]["losses"], value["findings"][0]["measured"]) == (
        [2.0, None, None],
        None,
    )


def test_text_says_what_where_and_how() -> None:
    failed = Finding("a-rule", "fail", "it broke", location=PLACE, fix="fix it")
    text = RENDERERS["text"](verdict(failed, Finding("b", "pass", "fine")))
    parts = (
        "FAIL a-rule",
        "it broke",
        "train.py:7 in main",
        "opt = AdamW(...)",
        "fix  fix it",
        "fsdp2 explain a-rule",
    )
    assert [part for part in parts if part not in text] == []
    assert text.rstrip().endswith("verdict: fail")


STATUSES: list[Status] = ["pass", "not_applicable", "inconclusive", "error", "fail"]


def test_text_shows_what_needs_attention_and_counts_the_rest() -> None:
    made = verdict(
        *(Finding(f"rule-{status}", status, f"evidence of {status}") for status in STATUSES)
    )
    brief, whole = renderers()["text"](made), renderers(verbose=True)["text"](made)
    shown = {status for status in STATUSES if f"evidence of {status}" in brief}
    assert shown == {"error", "fail", "inconclusive"}
    assert all(f"evidence of {status}" in whole for status in STATUSES)
    counts = "1 failed, 1 error, 1 not checked, 1 passed, 1 not applicable, 1 run in 1 s"
    assert brief.splitlines()[-2:] == [f"{counts}; -v lists them, with reasons", "verdict: fail"]
    assert whole.splitlines()[-2:] == [counts, "verdict: fail"] and "loss of step" in whole


@pytest.mark.parametrize(
    "reason, shown",
    [
        ("the train run stopped before it reached what this rule checks (see run-completes)", 0),
        ("losses or gradients are not finite, the loss from step 1 on", 0),
        ("the batch is known after a-rule passes", 0),
        ("one process takes 4 samples a step, 2 ranks take 8", 1),
        ("not like another-a-rule", 1),
    ],
)
def test_only_what_a_fault_left_without_its_run_is_not_listed(reason: str, shown: int) -> None:
    failed, unsure = Finding("a-rule", "fail", "broke"), Finding("b", "inconclusive", reason)
    text = " ".join(RENDERERS["text"](verdict(failed, unsure)).split())
    assert text.count(f"NOT CHECKED b {reason}") == shown
    assert text.count("NOT CHECKED 1 rule: what failed may be why") == 1 - shown
    warned = replace(failed, required=False)
    assert f"NOT CHECKED b {reason}" in " ".join(RENDERERS["text"](verdict(warned, unsure)).split())


def test_a_warning_is_counted_apart() -> None:
    found = [Finding("a", "pass", "x"), Finding("w", "fail", "odd", required=False)]
    made = verdict(*found, Finding("f", "fail", "wrong"))
    counts = json.loads(verdicts.valid("json", RENDERERS["json"](made)))["counts"]
    assert (counts["fail"], counts["warning"], counts["pass"]) == (1, 1, 1)
    assert "1 failed, 1 passed, 1 warning, 1 run" in RENDERERS["text"](made)
    assert 'failures="1"' in RENDERERS["junit"](made)
    written = summary(made)
    assert "`w` warns" in written and "`f` failed" in written


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verbose", [False, True])
def test_text_fits_the_terminal(
    columns: int, verbose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = " ".join(f"word-{k}" for k in range(60))
    place = Place(file="/a/train.py", line=7, function="main", code="opt = AdamW(" + "x" * 200)
    made = verdict(
        *(Finding(f"rule-{status}", status, long, location=place, fix=long) for status in STATUSES)
    )
    text = renderers(verbose=verbose)["text"](
        replace(made, runs=[{**made.runs[0], "losses": [1.23456789] * 20}])
    )
    assert max(map(len, text.splitlines())) <= columns
    assert all(
        text.split().count(f"word-{k}") == text.split().count("word-0") > 3 for k in range(60)
    ), "no word is broken"
    assert text.count("1.234568") == (20 if verbose else 0)


def test_text_has_a_bound_and_a_consequence_one_line() -> None:
    many = [
        Finding(f"rule-{k}", "fail", "word " * 100, location=PLACE, fix="fix " * 50)
        for k in range(60)
    ]
    text = RENDERERS["text"](verdict(*many))
    assert len(text) < 10_000 and text.rstrip().endswith("verdict: fail")
    text = RENDERERS["text"](
        verdict(Finding("cause", "fail", "x"), Finding("effect", "fail", "y", consequence=True))
    )
    assert "as a consequence:\n" in text and "effect: y" in text


@cases(
    "statuses, expected",
    (["pass"], "pass"),
    (["pass", "inconclusive"], "inconclusive"),
    (["inconclusive", "fail", "error"], "fail"),
    (["error", "pass"], "error"),
    (["not_applicable"], "inconclusive"),  # nothing was checked
    (["not_applicable", "pass"], "pass"),
)
def test_verdict(statuses: list[Status], expected: str) -> None:
    assert verdict_of([Finding("r", status, "") for status in statuses]) == expected

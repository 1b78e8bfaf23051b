"""Which tier a verdict is of, and what each tier may answer."""

import json
from typing import Any

from records import cases
from verdicts import ENVIRONMENT
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.report.json_report import as_dict
from verified_fsdp2.verifier.report.limits_text import SIMULATED, limits, verdict_line
from verified_fsdp2.verifier.verdict import Verdict

PASSED = Finding("root-only-wrap", "pass", "")


def run(role: str) -> dict[str, Any]:
    return {"role": role, "world_size": 2, "losses": [1.0], "grad_norms": [1.0]}


def verdict(
    answer: Any, *roles: str, refused: str = "", linted: int = 0, **sources: Any
) -> Verdict:
    target = {
        "script": "train.py",
        "command": "fsdp2 verify train.py",
        **({"files": linted} if linted else {}),
    }
    counts = {
        "files": 1,
        "functions": 3,
        "calls_not_followed": 2,
        "without_training": 0,
        "training_required": True,
    }
    facts = (
        {"sources": {**counts, "not_followed": [], "suppressed": [], "rules": [], **sources}}
        if sources
        else {}
    )
    return Verdict(
        answer, target, ENVIRONMENT, [run(role) for role in roles], [PASSED], facts, refused=refused
    )


@cases(
    "made, tier",
    (verdict("pass", "train", "reference"), "ranks"),
    (verdict("inconclusive"), "ranks"),
    (verdict("pass", "simulate"), "simulate"),
    (verdict("no_findings", rules=[]), "static"),
    ids=["runs", "none yet", "simulated", "sources"],
)
def test_tier(made: Verdict, tier: str) -> None:
    assert made.tier == tier == as_dict(made)["tier"]
    assert bool(limits(made)) == (tier != "ranks") == bool(as_dict(made)["limits"])


def test_a_simulated_pass_names_its_limits() -> None:
    made = verdict("pass", "simulate")
    assert SIMULATED in verdict_line(made) and SIMULATED in RENDERERS["text"](made).splitlines()[-1]
    assert json.loads(RENDERERS["sarif"](made))["runs"][0]["properties"]["limits"] == SIMULATED
    assert SIMULATED in RENDERERS["junit"](made)
    assert verdict_line(verdict("pass", "train")) == "verdict: pass"
    assert verdict_line(verdict("fail", "simulate")) == "verdict: fail"


@cases(
    "linted, sources, answer, code",
    (1, {"without_training": 0}, "no_findings", 0),
    (0, {"without_training": 0}, "no_findings", 4),
    (1, {"without_training": 1}, "inconclusive", 4),
    (0, {"without_training": 1}, "inconclusive", 4),
    (2, {"files": 2, "without_training": 1}, "no_findings", 0),
    (1, {"without_training": 1, "training_required": False}, "no_findings", 0),
)
def test_sources_never_pass(linted: int, sources: dict[str, Any], answer: str, code: int) -> None:
    made = verdict("inconclusive", linted=linted, **sources)
    assert made.of([PASSED]) == answer
    assert verdict(answer, linted=linted, **sources).exit_code == code
    assert made.of([Finding("a", "fail", "")]) == "fail"

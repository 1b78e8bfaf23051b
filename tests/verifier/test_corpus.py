"""Every seeded fault is found by its rule; every right script passes or is honestly open, and nothing else fires."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus import header
from verified_fsdp2.verifier.rules import RULES

pytestmark = pytest.mark.launch
TESTS = Path(__file__).parents[1]
FAULTS = sorted((TESTS / "faults").glob("*.py"))
ZOO = sorted((TESTS / "zoo").glob("*.py"))


@pytest.mark.parametrize("script", FAULTS, ids=lambda p: p.stem)
def test_fault_is_found(verify_script, script: Path) -> None:
    rule = header(script)["rule"]
    (finding,) = verify_script(script, only=(rule,)).findings
    assert finding.status == "fail", finding.evidence
    assert finding.fix
    if rule != "run-completes":
        assert finding.location is not None
        assert Path(finding.location["file"]) == script


@pytest.mark.parametrize("script", ZOO, ids=lambda p: p.stem)
def test_right_script_is_left_alone(verify_script, script: Path) -> None:
    verdict = verify_script(script)
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status == "fail"] == []
    told = header(script)
    if "resume_args" in told:
        passed = {f.rule for f in verdict.findings if f.status == "pass"}
        assert {r.name for r in RULES.values() if r.family == "checkpoint"} <= passed


def test_every_rule_has_a_fault() -> None:
    assert {header(script)["rule"] for script in FAULTS} == set(RULES)

"""A seeded fault of every rule is found by it; right scripts pass or are honestly open, and nothing else fires.

These are the representative part of the corpus; `make detection` runs the whole of it, with every rule on every case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus import Case, faults, representative, right
from verified_fsdp2.verifier.rules import RULES

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("case", representative(faults()), ids=lambda case: case.name)
def test_fault_is_found(verify_case, case: Case) -> None:
    only = () if case.rule == "unused-suppression" else (case.rule,)  # it must know what the others say
    finding = next(f for f in verify_case(case, only=only).findings if f.rule == case.rule)
    assert finding.status == "fail", finding.evidence
    assert finding.fix
    if case.rule != "run-completes":
        assert finding.location is not None
        assert Path(finding.location.file).name in [p.name for p in case.files()]


@pytest.mark.parametrize("case", representative(right()), ids=lambda case: case.name)
def test_right_script_is_left_alone(verify_case, case: Case) -> None:
    verdict = verify_case(case)
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status == "fail"] == []
    if "resume_args" in case.settings:
        judged = {f.rule for f in verdict.findings if f.status in ("pass", "not_applicable")}
        assert {r.name for r in RULES.values() if r.family == "checkpoint"} <= judged


def test_every_rule_has_a_fault() -> None:
    elsewhere = {"gloo-avg-is-sum"}  # no script has this fault, a torch has it: test_average.py
    assert {case.rule for case in faults()} == set(RULES) - elsewhere

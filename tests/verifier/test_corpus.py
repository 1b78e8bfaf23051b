"""A seeded fault of every rule is found by it; right scripts pass or are inconclusive, and no other
rule fails.

`make test` runs one fault of each family and a few right scripts on ranks; each rule's own logic is
tested on traces in test_rules*.py and their neighbours. `make test-all` runs a fault of every rule,
`make detection` the whole corpus with every rule.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from corpus import IN_EVERY_TEST_RUN, Case, faults, representative, right
from verified_fsdp2.verifier.rules import RULES


def cases(found: list[Case]) -> list[Any]:
    """The representative cases as parameters, those that only `make test-all` runs marked."""
    marks = {True: (), False: pytest.mark.full}
    return [
        pytest.param(case, id=case.name, marks=marks[case.name in IN_EVERY_TEST_RUN])
        for case in representative(found)
    ]


@pytest.mark.parametrize("case", cases(faults()))
def test_fault_is_found(verify_case, case: Case) -> None:
    commented = re.findall(
        r"ignore\[([\w-]+)\]", str(case.edits)
    )  # a comment is judged by the rule that it names
    finding = next(
        f for f in verify_case(case, only=(case.rule, *commented)).findings if f.rule == case.rule
    )
    assert finding.status == "fail", finding.evidence
    assert finding.fix
    if case.rule != "run-completes":
        assert finding.location is not None
        assert Path(finding.location.file).name in [p.name for p in case.files()]


@pytest.mark.parametrize("case", cases(right()))
def test_right_script_is_left_alone(verify_case, case: Case) -> None:
    verdict = verify_case(case)
    assert [(f.rule, f.evidence) for f in verdict.findings if f.status == "fail"] == []
    if "resume_args" in case.settings:
        judged = {f.rule for f in verdict.findings if f.status in ("pass", "not_applicable")}
        assert {r.name for r in RULES.values() if r.family == "checkpoint"} <= judged


def test_every_test_run_has_a_fault_of_each_family() -> None:
    chosen = [case for case in representative(faults()) if case.name in IN_EVERY_TEST_RUN]
    here = {case.name for case in [*chosen, *representative(right())]}
    assert set(IN_EVERY_TEST_RUN) <= here
    families = {rule.family for rule in RULES.values()} - {
        "environment"
    }  # of the machine, not of a script
    assert {RULES[case.rule].family for case in chosen if case.rule} == families

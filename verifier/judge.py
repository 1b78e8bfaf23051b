"""Judges evidence: what each rule finds, then what becomes of the findings.

Pure functions: no run is made, and nothing is changed. What is done to a finding, in which order
and why, are the tables of `judging`; here they are applied. An exception in a rule is an error of
fsdp2, and the other rules are judged.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from .analysis.nonsmooth_steps import before_the_kink
from .config.policy import BY_HAND, Policy
from .errors import text_of
from .evidence import Evidence
from .finding import Finding
from .judging.all_findings import OF_A_TEAM, OF_ALL, required_and_not_done
from .judging.in_windows import combined
from .judging.one_finding import OF_ONE, QUESTIONS
from .judging.passes import printed
from .rules import RULES
from .rules.base import Rule
from .rules.naming import is_skipped
from .source.suppress import RULE as UNUSED
from .source.suppress import problems, uses
from .trace.origin import place_in_ours
from .verdict import Verdict


def judge(
    evidence: Evidence, chosen: Collection[str], beyond: Mapping[str, str] | None = None
) -> list[Finding]:
    """The findings of the chosen rules, in their order.

    The rules `beyond` what was run are inconclusive, for these reasons.
    """
    evidence = before_the_kink(evidence)
    findings: list[Finding] = []
    for name in chosen:
        started = time.monotonic()
        if name == UNUSED:  # the last of all rules: it reads what the others found
            found = judge_one(RULES[UNUSED], _with_unused(evidence, findings))
        else:
            found = judge_one(RULES[name], evidence, (beyond or {}).get(name, ""))
        findings.append(replace(found, seconds=time.monotonic() - started))
    for one in OF_ALL:
        findings = one.apply(findings, evidence)
    late = [name for name in chosen if RULES[name].in_windows]
    return combined(
        findings,
        (
            (one.window, judge(one.evidence, late))
            for one in evidence.windows
            if one.evidence is not None
        ),
    )


def judge_one(rule: Rule, evidence: Evidence, beyond: str = "") -> Finding:
    """What one rule finds, by itself."""
    try:
        return _judged(rule, evidence, beyond)
    except Exception as error:
        return _fault(rule.name, error)


def _judged(rule: Rule, evidence: Evidence, beyond: str) -> Finding:
    answers = (question.apply(rule, evidence) for question in QUESTIONS)
    found = rule.unknown(beyond) if beyond else next(filter(None, answers))
    for one in OF_ONE:
        found = one.apply(rule, evidence, found)
    return found


def _fault(rule: str, error: Exception) -> Finding:
    """An exception in a rule: an error of ours, never of the script."""
    what = f"fsdp2 itself failed in this rule: {text_of(error)} ({place_in_ours(error)})"
    return Finding(
        rule, "error", what, fix=f"Report it with this line; `--skip {rule}` skips the rule."
    )


def _with_unused(evidence: Evidence, findings: list[Finding]) -> Evidence:
    """The evidence with the suppressions that suppress nothing, as hits."""
    used = uses(
        evidence.suppressions, ((f.rule, f.location) for f in findings if f.status == "fail")
    )
    judged = {f.rule for f in findings if f.status in ("pass", "fail", "not_applicable")}
    hits = tuple(problems(evidence.suppressions, RULES, judged, used))
    return replace(evidence, hits={UNUSED: hits})


def apply_policy(verdict: Verdict, policy: Policy, left_out: Collection[str]) -> Verdict:
    """The verdict by a team's policy.

    `left_out` are the rules that were not judged because they are skipped.
    """
    findings = list(verdict.findings)
    for one in OF_A_TEAM:
        findings = one.apply(findings, policy)
    if verdict.tier == "ranks":
        parts = verdict.facts.get("coverage", {}).get("parts", {})
        findings += required_and_not_done(parts, policy.require)
    skipped = list(verdict.skipped)
    for rule in left_out:
        skip = next((s for s in policy.skips if not s.over and is_skipped(rule, [s.rule])), None)
        reason, until = (skip.reason, skip.until) if skip else (BY_HAND, None)
        skipped.append({"rule": rule, "reason": reason, "until": until})
    verdict = replace(verdict, verdict=verdict.of(findings), findings=findings, skipped=skipped)
    return verdict.remarked(policy.remarks)


def tables() -> str:
    """What becomes of a finding, as text."""
    return "\n".join(
        (
            printed("Questions to a rule, until one answers", QUESTIONS),
            printed("To what it finds", OF_ONE),
            printed("To all findings", OF_ALL),
            printed("To all findings, by a team's policy", OF_A_TEAM),
        )
    )

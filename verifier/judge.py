"""Judges evidence: for each rule whether it applies and what it finds; then applies suppressions,
tolerances and a team's policy.

Pure functions: no run is made, and nothing is changed. An exception in a rule is an error of fsdp2,
and the other rules are judged.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .analysis.ending import comes_to_the_same_end
from .analysis.nonsmooth_steps import before_the_kink
from .analysis.platform import NOT_HERE, beyond_cuda_on_cpu, not_installed, replicas_not_reduced
from .analysis.root_cause import computing
from .analysis.steps_to_compare import steps_differ
from .analysis.wording import count
from .config.policy import BY_HAND, Policy, Skip, Widening
from .errors import text_of
from .evidence import Evidence, Sources
from .finding import Finding, Suppression
from .rules import RULES
from .rules.base import Rule
from .rules.naming import is_named, is_skipped
from .source.suppress import RULE as UNUSED
from .source.suppress import covering, problems, uses
from .trace.events import End, ProbeError
from .trace.origin import place_in_ours
from .trace.roles import OF_CHECKPOINTS
from .verdict import Verdict

LISTENED = (
    "wrapping",
    "init",
    "mesh",
)  # families of rules whose listeners keep their own errors to themselves


def judge(
    evidence: Evidence, chosen: Collection[str], beyond: Mapping[str, str] | None = None
) -> list[Finding]:
    """The findings of the chosen rules, in their order.

    The rules `beyond` what was run are inconclusive, for these reasons.

    A rule that only compares (hang, parity) fails as a consequence if a rule that names a cause has
    failed.
    """
    evidence = before_the_kink(evidence)
    findings: list[Finding] = []
    failures: list[Finding] = []  # before suppressions
    for name in chosen:
        started = time.monotonic()
        if name == UNUSED:  # judged after the rules that suppressions name
            used = uses(evidence.suppressions, ((f.rule, f.location) for f in failures))
            judged = {f.rule for f in findings if f.status in ("pass", "fail", "not_applicable")}
            hits = tuple(problems(evidence.suppressions, RULES, judged, used))
            found = judge_one(RULES[UNUSED], replace(evidence, hits={UNUSED: hits}))
        else:
            found = judge_one(RULES[name], evidence, (beyond or {}).get(name, ""))
        found = with_code(found, evidence.sources)
        failures += [found] if found.status == "fail" else []
        found = apply_suppressions(found, evidence.suppressions)
        found = apply_tolerance(found, evidence.tolerances)
        findings.append(replace(found, seconds=time.monotonic() - started))
    return _with_consequences(_confirmed(_without_effect(findings, evidence))) + faults_of_ours(
        evidence
    )


def judge_one(rule: Rule, evidence: Evidence, beyond: str = "") -> Finding:
    """What one rule finds. Where it finds nothing out, what the static tier saw counts."""
    try:
        found = rule.unknown(beyond) if beyond else _judged(rule, evidence)
        if found.status in ("inconclusive", "not_applicable") and (
            hits := evidence.hits.get(rule.name)
        ):
            return rule.failed(hits[0].message, hits[0].location, tier="static")
    except Exception as error:
        return fault(rule.name, error)
    return found


def _judged(rule: Rule, evidence: Evidence) -> Finding:
    if evidence.cuda_on_cpu and rule.only_on_cpu:
        return rule.not_applicable(NOT_HERE)
    if reason := rule.too_short(evidence):
        return rule.unknown(reason)
    if reason := rule.applies(evidence):
        found = rule.not_applicable(reason)
    elif reason := rule.unseen(evidence):
        return rule.unknown(reason)
    else:
        found = rule.judge(evidence)
    if found.status == "fail" and any(
        run.probe_failed and run.role in rule.needs for run in evidence.runs
    ):
        return Finding(
            rule.name, "error", "fsdp2 itself failed in a run that this rule needs: see `verifier`"
        )
    doubt = ""
    if (
        found.status == "fail"
        and rule.about_the_resume
        and (steps := comes_to_the_same_end(evidence))
    ):
        same = (
            f"{steps} steps after the resume the script ends with the weights of the uninterrupted"
            " run, bit by bit"
        )
        found = (
            rule.unknown(f"its state could not be aligned: {same}")
            if rule.beside_the_weights
            else rule.passed(same)
        )
    if found.status == "fail":
        compares = rule.family == "hang" or not rule.names_a_cause
        doubt = (
            (_slow(rule, evidence) if compares else "")
            or _cut(rule, evidence)
            or _lacks(rule, evidence)
        )
    elif found.status in ("pass", "not_applicable") and rule.family in LISTENED:
        doubt = _probe_error(evidence)
    return rule.unknown(doubt) if doubt else found


def _slow(rule: Rule, evidence: Evidence) -> str:
    """Why a run of this rule may only have been too slow; "" if none was."""
    run = next((run for run in evidence.runs if run.slow and run.role in rule.needs), None)
    if run is None:
        return ""
    doing = computing(run) or "it was still making progress"
    what = (
        f"{doing} when the {run.timeout:.0f} s of the {run.role} run were over, after"
        f" {count(run.steps(), 'step')}"
    )
    return f"{what}: pass a larger --timeout, a smaller model or fewer --steps"


def _cut(rule: Rule, evidence: Evidence) -> str:
    """Why ranks may wait for one another only since the train run ends its script early; "" if the
    script's own end shows that they do.
    """
    train, survey = evidence.train, evidence.survey
    if (
        rule.family != "hang"
        or train is None
        or train.completed
        or survey is None
        or not survey.completed
    ):
        return ""
    stopped = any(end.how == "stopped" for end in train.all(End)) and not steps_differ(survey)
    return (
        "the whole script comes to its end, and the train run ended its ranks at different places"
        if stopped
        else ""
    )


def _lacks(rule: Rule, evidence: Evidence) -> str:
    """At what a run of this rule stopped that this machine does not have: FSDP2 for its CPU, a part
    of CUDA, a package.
    """
    runs = [run for run in evidence.runs if run.role in rule.needs | rule.reads]
    asked = (
        replicas_not_reduced,
        *([beyond_cuda_on_cpu] if evidence.cuda_on_cpu else []),
        not_installed,
    )
    return next((reason for lacks in asked for run in runs if (reason := lacks(run))), "")


def fault(rule: str, error: Exception) -> Finding:
    """An exception in a rule: an error of ours, never of the script."""
    what = f"fsdp2 itself failed in this rule: {text_of(error)} ({place_in_ours(error)})"
    return Finding(
        rule, "error", what, fix=f"Report it with this line; `--skip {rule}` skips the rule."
    )


def _probe_error(evidence: Evidence) -> str:
    """Why the probe did not see all that the rules of LISTENED read; "" if it did."""
    traces = evidence.train.traces if evidence.train is not None else ()
    record = next((r for trace in traces for r in trace.of(ProbeError)), None)
    return f"the probe failed ({record.symbol}: {record.text})" if record else ""


def faults_of_ours(evidence: Evidence) -> list[Finding]:
    """An error finding if the probe failed in a run, with the symbol; the rules are judged on what
    was recorded all the same.
    """
    texts = [f"{run.role} run, {text}" for run in evidence.runs for text in run.probe_errors]
    if not texts:
        return []
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return [Finding("verifier", "error", f"fsdp2 itself failed: {texts[0]}{more}")]


def with_code(finding: Finding, sources: Sources) -> Finding:
    """The finding with the code of its line, where only the line is known."""
    place = finding.location
    if place is None or place.code:
        return finding
    return replace(finding, location=replace(place, code=sources.line(place.file, place.line)))


def apply_suppressions(finding: Finding, suppressions: Sequence[Suppression]) -> Finding:
    """The finding; a pass that says so if a suppression covers its place."""
    if finding.status == "fail" and (one := covering(suppressions, finding.rule, finding.location)):
        return replace(finding, status="pass", evidence=one.message(), fix=None)
    return finding


def apply_tolerance(finding: Finding, tolerances: Mapping[str, Widening]) -> Finding:
    """The finding; one whose limit a team has widened says so first."""
    by = tolerances.get(finding.rule)
    if by is None or finding.limit is None:
        return finding
    return replace(
        finding, evidence=f"[limit taken {by.times:g} times: {by.reason}] {finding.evidence}"
    )


def _without_effect(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """The findings; a failure whose effect a run would have shown, and has not, is a warning."""
    passed = {f.rule for f in findings if f.status == "pass"}
    return [
        (
            replace(
                f,
                required=False,
                evidence=(
                    f"{f.evidence}; without effect in these runs: {RULES[f.rule].shown_by} passes"
                ),
            )
            if f.status == "fail"
            and RULES[f.rule].shown_by in passed
            and not RULES[f.rule].shared(evidence)
            else f
        )
        for f in findings
    ]


def _confirmed(findings: list[Finding]) -> list[Finding]:
    """The findings; a suspicion that no other failure confirms is inconclusive."""
    if any(f.status == "fail" and f.required and not f.suspicion for f in findings):
        return findings
    alone = "nothing else that was compared shows it, and a right script may be made so"
    return [
        (
            replace(
                f, status="inconclusive", evidence=f"{f.evidence}; {alone}: decide it by the code"
            )
            if f.status == "fail" and f.required and f.suspicion
            else f
        )
        for f in findings
    ]


def _with_consequences(findings: list[Finding]) -> list[Finding]:
    """The findings; those that another one explains, and differences where one names a cause, are
    its consequences.

    What a resume loses explains no difference between runs that resume from nothing.
    """
    failed = [f for f in findings if f.status == "fail" and not f.warns]
    effects = [f for f in failed if not RULES[f.rule].names_a_cause]
    after_resume = {f.rule: bool(RULES[f.rule].needs & OF_CHECKPOINTS) for f in failed}
    causes = [after_resume[f.rule] for f in failed if f not in effects]
    explained = {name for f in failed for name in RULES[f.rule].explains}
    follows = [
        f
        for f in failed
        if f.rule in explained
        or (f in effects and any(after_resume[f.rule] or not c for c in causes))
    ]
    return [replace(f, consequence=True) if f in follows else f for f in findings]


def apply_policy(verdict: Verdict, policy: Policy, left_out: Collection[str]) -> Verdict:
    """The verdict by a team's policy: what it does not require may be inconclusive, and an expired
    skip fails.

    `left_out` are the rules that were not judged because they are skipped.
    """
    required = policy.required
    allowed = [
        f for f in verdict.findings if f.status == "inconclusive" and not is_named(f.rule, required)
    ]
    findings = [
        replace(f, required=False) if required and f in allowed else f for f in verdict.findings
    ]
    findings = [
        replace(f, required=True) if f.warns and is_named(f.rule, required) else f for f in findings
    ]
    late = [_late(skip) for skip in policy.skips if skip.over]
    if late:  # a failure replaces the pass of the same rule
        findings = [
            f for f in findings if f.rule != UNUSED or f.status not in ("pass", "not_applicable")
        ] + late
    skipped = list(verdict.skipped)
    for rule in left_out:
        skip = next((s for s in policy.skips if not s.over and is_skipped(rule, [s.rule])), None)
        reason, until = (skip.reason, skip.until) if skip else (BY_HAND, None)
        skipped.append({"rule": rule, "reason": reason, "until": until})
    return replace(verdict, verdict=verdict.of(findings), findings=findings, skipped=skipped)


def _late(skip: Skip) -> Finding:
    message = (
        f"the skip of {skip.rule} expired on {skip.until} ({skip.reason}); the rule is judged again"
    )
    fix = f"Fix what {skip.rule} reports and remove the skip, or give the skip a new date."
    return Finding(UNUSED, "fail", message, location=skip.location, fix=fix, tier="static")

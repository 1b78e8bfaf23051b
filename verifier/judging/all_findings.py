"""What becomes of all findings together.

OF_ALL are applied to the list, one after the other; OF_A_TEAM after them, with the team's policy.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config.parts import OPTIONS, Part
from ..config.policy import Policy, Skip
from ..evidence import Evidence
from ..finding import Finding
from ..rules import RULES
from ..rules.naming import is_named
from ..rules.policies import OnlyExplained, ShownBy
from ..source.suppress import RULE as UNUSED
from ..source.suppress import covering
from ..trace.roles import OF_CHECKPOINTS
from .passes import Pass

OfAll = Callable[[list[Finding], Evidence], list[Finding]]
# The name of findings on what a team requires and no run did; it is no rule.
REQUIRED = "required"
OfATeam = Callable[[list[Finding], Policy], list[Finding]]


def with_code(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """With the code of a finding's line, where only the line is known."""

    def read(finding: Finding) -> Finding:
        place = finding.location
        if place is None or place.code:
            return finding
        code = evidence.sources.line(place.file, place.line)
        return replace(finding, location=replace(place, code=code))

    return [read(finding) for finding in findings]


def suppressed(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """A failure whose place a suppression covers is a pass that says so."""

    def read(finding: Finding) -> Finding:
        one = covering(evidence.suppressions, finding.rule, finding.location)
        if finding.status != "fail" or one is None:
            return finding
        return replace(finding, status="pass", evidence=one.message(), fix=None)

    return [read(finding) for finding in findings]


def widened(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """A finding whose limit a team has widened says so first."""

    def read(finding: Finding) -> Finding:
        by = evidence.tolerances.get(finding.rule)
        if by is None or finding.limit is None:
            return finding
        note = f"[limit taken {by.times:g} times: {by.reason}]"
        return replace(finding, evidence=f"{note} {finding.evidence}")

    return [read(finding) for finding in findings]


def without_effect(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """A failure whose effect another rule would have shown, and has not, is a warning."""
    passed = {f.rule for f in findings if f.status == "pass"}

    def read(finding: Finding) -> Finding:
        if finding.status != "fail":
            return finding
        shown = RULES[finding.rule].policy(ShownBy)
        if shown is None or shown.rule not in passed:
            return finding
        # A mean of micro-batches' means that one process makes too (exam round 10).
        if shown.unless is not None and shown.unless(evidence):
            return finding
        text = f"{finding.evidence}; without effect in these runs: {shown.rule} passes"
        return replace(finding, required=False, evidence=text)

    return [read(finding) for finding in findings]


def confirmed(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """A suspicion that no other failure confirms is inconclusive."""
    decide = [f for f in findings if f.status == "fail" and f.required]
    if not all(f.suspicion for f in decide):
        return findings
    alone = "nothing else that was compared shows it, and a right script may be made so"

    def as_inconclusive(finding: Finding) -> Finding:
        text = f"{finding.evidence}; {alone}: decide it by the code"
        return replace(finding, status="inconclusive", evidence=text)

    return [as_inconclusive(f) if f in decide else f for f in findings]


def with_consequences(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """A failure that another one explains, and a difference where another one names a cause, is a
    consequence.
    """
    failed = [f for f in findings if f.status == "fail" and not f.warns]
    effects = [f for f in failed if not (RULES[f.rule].names_a_cause or f.explains)]
    # What a resume loses explains no difference between runs that resume from nothing.
    after_resume = {f.rule: bool(RULES[f.rule].needs & OF_CHECKPOINTS) for f in failed}
    # An error that a script swallowed in step 90 explains no difference in step 3.
    causes = [after_resume[f.rule] for f in failed if f not in effects and not f.explains]
    explained = {f.rule: {*RULES[f.rule].explains, *f.explains} for f in failed}
    of_any = set().union(*explained.values())
    of_runs = set().union(*(explained[f.rule] for f in failed if f.tier != "static"))

    def follows(finding: Finding) -> bool:
        # A crash stood as the consequence of an unrelated line of the sources (seven reports on
        # public scripts).
        if RULES[finding.rule].policy(OnlyExplained):
            return finding.rule in of_runs and not finding.explains
        if finding.explains:
            return finding.rule in of_any
        caused = any(after_resume[finding.rule] or not cause for cause in causes)
        return finding.rule in of_any or (finding in effects and caused)

    return [replace(f, consequence=True) if f in failed and follows(f) else f for f in findings]


def faults_of_ours(findings: list[Finding], evidence: Evidence) -> list[Finding]:
    """And an error, with the symbol, if the probe failed in a run."""
    texts = [f"{run.role} run, {text}" for run in evidence.runs for text in run.probe_errors]
    if not texts:
        return findings
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return [*findings, Finding("verifier", "error", f"fsdp2 itself failed: {texts[0]}{more}")]


def must_be_decided(findings: list[Finding], policy: Policy) -> list[Finding]:
    """What no run did is inconclusive in a rule that a team requires."""

    def named(f: Finding) -> bool:
        return f.status == "not_covered" and is_named(f.rule, policy.required)

    return [replace(f, status="inconclusive") if named(f) else f for f in findings]


def required_and_not_done(
    parts: Mapping[str, Mapping[str, Any]], require: Iterable[Part]
) -> list[Finding]:
    """An inconclusive finding for each part of the training that a team requires and no run did.

    `parts`: facts["coverage"]["parts"] of the report; {} where no run made a step.
    """
    return [
        Finding(REQUIRED, "inconclusive", _not_done(name, parts.get(name)), part=name)
        for name in require
        if name not in parts or not parts[name]["done"]
    ]


def _not_done(name: Part, one: Mapping[str, Any] | None) -> str:
    if one is None:
        return f"{name} is required, and no run made a step"
    if name == "gpu":
        return "gpu is required, and the ranks computed on the CPU: give --device cuda"
    if not one["there"]:
        return f"{name} is required, and neither the runs nor the sources show it"
    if one["tried"]:
        return f"{name} is required; {one['tried']}"
    option = f" ({one['option']} looks like it)" if one["option"] else ""
    advice = f"give arguments with which the script does it{option}"
    if name in OPTIONS:
        advice = f"give {OPTIONS[name]}"
    where = f" at {one['file'].rpartition('/')[2]}:{one['line']}" if one["file"] else ""
    return f"{name} is required, and no run did it; the sources have it{where}: {advice}"


def may_be_inconclusive(findings: list[Finding], policy: Policy) -> list[Finding]:
    """What a team does not require may be inconclusive, if it requires anything."""

    def free(f: Finding) -> bool:
        return f.status == "inconclusive" and not is_named(f.rule, policy.required)

    return [replace(f, required=False) if policy.required and free(f) else f for f in findings]


def must_hold(findings: list[Finding], policy: Policy) -> list[Finding]:
    """A warning of a rule that a team requires decides."""

    def named(f: Finding) -> bool:
        return f.warns and is_named(f.rule, policy.required)

    return [replace(f, required=True) if named(f) else f for f in findings]


def in_order(findings: list[Finding], policy: Policy) -> list[Finding]:
    """Failures in the order in which a person must act: a crash, then what is wrong in every run,
    then what only a crash in the middle of a save shows, then warnings; then all else as it was.
    """

    def key(finding: Finding) -> int:
        if finding.status not in ("fail", "error"):
            return 5
        if finding.warns:
            return 4
        rule = RULES.get(finding.rule)
        if finding.consequence:
            return 3
        if rule is not None and rule.needs & {"crash", "damaged"}:
            return 2
        return 0 if rule is not None and rule.policy(OnlyExplained) else 1

    return sorted(findings, key=key)


def expired(findings: list[Finding], policy: Policy) -> list[Finding]:
    """A skip that has expired fails."""
    late = [_late(skip) for skip in policy.skips if skip.over]
    if not late:
        return findings
    # It replaces the pass of the same rule.
    holds = [f for f in findings if f.rule == UNUSED and f.status in ("pass", "not_applicable")]
    return [f for f in findings if f not in holds] + late


def _late(skip: Skip) -> Finding:
    message = (
        f"the skip of {skip.rule} expired on {skip.until} ({skip.reason}); the rule is judged again"
    )
    fix = f"Fix what {skip.rule} reports and remove the skip, or give the skip a new date."
    return Finding(UNUSED, "fail", message, location=skip.location, fix=fix, tier="static")


OF_ALL: tuple[Pass[OfAll], ...] = (
    Pass(
        with_code,
        "a reader sees the line without opening the file",
        "anywhere in this table: no pass reads the code of a line",
    ),
    Pass(
        suppressed,
        "a comment `# fsdp2: ignore[rule] reason` decides for its line",
        "before the passes that compare findings: what is suppressed explains and confirms nothing",
    ),
    Pass(
        widened,
        "a limit that a team widened is never widened silently",
        "after `suppressed`, which replaces the text: a finding that it covers says so too",
    ),
    Pass(
        without_effect,
        "state that a resume lost, and the runs show no difference, changed nothing here",
        "before `confirmed` and `with_consequences`: a warning confirms and explains nothing",
    ),
    Pass(
        confirmed,
        "right scripts keep values of one rank, or move apart after resharding (exam r10 kb_09)",
        "before `with_consequences`: what is inconclusive explains nothing",
    ),
    Pass(
        with_consequences,
        "one fault makes many rules fail: the report begins with its cause",
        "after all passes that may take a failure back",
    ),
    Pass(
        faults_of_ours,
        "rules are judged on what was recorded all the same, so the error needs a line of its own",
        "last: it is no finding of a rule, and the passes above look rules up",
    ),
)
OF_A_TEAM: tuple[Pass[OfATeam], ...] = (
    Pass(
        must_be_decided,
        "a team that requires a rule does not accept that no run did what it is about",
        "before `may_be_inconclusive`, which looks at what is inconclusive",
    ),
    Pass(
        may_be_inconclusive,
        "a team that requires some rules accepts that others are inconclusive",
        "anywhere in this table: it changes what is inconclusive, the others failures",
    ),
    Pass(
        must_hold,
        "a team may require what otherwise only warns",
        "after `without_effect` and the rules themselves, which say what warns",
    ),
    Pass(
        expired,
        "a skip with a date is a promise",
        "after what decides: it adds a failure in place of a pass of the rule on suppressions",
    ),
    Pass(
        in_order,
        "a reader acts on the first finding: a crash was shown behind static findings",
        "last: the passes before it say what fails, and what only warns",
    ),
)

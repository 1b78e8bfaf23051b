"""What a team has decided about verdicts: rules that are skipped for a time, rules that must be decided, limits that are wider."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import UserError
from .finding import Finding
from .static.suppress import RULE as UNUSED
from .verdict import Verdict

BY_HAND = "left out by --skip"


@dataclass(frozen=True)
class Skip:
    """A rule or family that is not judged until a day. `over`: that day is past. `location` is where it is written."""

    rule: str
    reason: str
    until: str
    over: bool
    location: dict[str, Any]


@dataclass(frozen=True)
class Widening:
    """A limit is taken this many times."""

    times: float
    reason: str


@dataclass(frozen=True)
class Policy:
    """Without `required`, every rule must be decided."""

    skips: tuple[Skip, ...] = ()
    required: tuple[str, ...] = ()
    tolerances: Mapping[str, Widening] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for skip in self.skips:
            if skip.rule in self.required:
                place = f"{skip.location['file']}:{skip.location['line']}:{skip.location['column']}"
                raise UserError(f"{place}: {skip.rule} is skipped and required; take one of them away")

    @property
    def skipped(self) -> list[str]:
        """The rules and families that are skipped today."""
        return [skip.rule for skip in self.skips if not skip.over]


def decided(verdict: Verdict, policy: Policy, left_out: Collection[str]) -> Verdict:
    """The verdict by this policy: what it does not require may be open, and a skip that is over fails.

    `left_out` are the rules that were not judged because they are skipped.
    """
    from .rules.naming import is_named  # the rules read the evidence, which holds a policy's limits

    findings = [
        replace(f, required=False)
        if f.status == "inconclusive" and policy.required and not is_named(f.rule, policy.required)
        else f
        for f in verdict.findings
    ]
    late = [_late(skip) for skip in policy.skips if skip.over]
    if late:  # one finding a rule, as far as that goes: a failure takes the place of the pass
        findings = [f for f in findings if f.rule != UNUSED or f.status != "pass"] + late
    skipped = [
        {"rule": rule, "reason": told.reason if told else BY_HAND, "until": told.until if told else None}
        for rule in left_out
        for told in [next((s for s in policy.skips if not s.over and is_named(rule, [s.rule])), None)]
    ]
    return replace(verdict, verdict=verdict.of(findings), findings=findings, skipped=skipped)


def _late(skip: Skip) -> Finding:
    location = {key: skip.location[key] for key in ("file", "line", "function", "code")}
    told = f"the skip of {skip.rule} ended on {skip.until} ({skip.reason}); the rule is judged again"
    mend = f"Mend what {skip.rule} says and take the skip away, or decide anew and give it another date."
    return Finding(UNUSED, "fail", told, location=location, fix=mend, tier="static")


def widened(finding: Finding, tolerances: Mapping[str, Widening]) -> Finding:
    """The finding; one whose limit was widened says so first."""
    by = tolerances.get(finding.rule)
    if by is None or finding.limit is None:
        return finding
    return replace(finding, evidence=f"[limit taken {by.times:g} times: {by.reason}] {finding.evidence}")


def open_but_allowed(findings: Sequence[Finding]) -> list[str]:
    """The rules that are open without holding up the verdict."""
    return [f.rule for f in findings if f.status == "inconclusive" and not f.required]

"""A rule's result, and what all results together come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "inconclusive", "error"]


@dataclass(frozen=True)
class Finding:
    """One clause of the contract, judged. `location`: {"file", "line", "function", "code"} in the user's code."""

    rule: str
    status: Status
    evidence: str
    measured: float | None = None
    limit: float | None = None
    location: dict[str, Any] | None = None
    fix: str | None = None
    consequence: bool = False
    seconds: float = 0.0
    tier: str = "ranks"
    required: bool = True  # whether it may not stay open

    @property
    def margin(self) -> float | None:
        """limit / measured: how many times the measured value would fit into the limit."""
        if self.measured is None or self.limit is None or self.measured == 0:
            return None
        return self.limit / self.measured


@dataclass(frozen=True)
class Hit:
    """What a static detector saw in a source: `told` says what, `location` where."""

    rule: str
    told: str
    location: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The answer for one target."""

    verdict: Status
    target: dict[str, Any]
    environment: dict[str, Any]
    runs: Sequence[dict[str, Any]]
    findings: Sequence[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    seconds: float = 0.0
    skipped: Sequence[dict[str, Any]] = ()  # rules that were not judged: {"rule", "reason", "until"}


def verdict_of(findings: Sequence[Finding]) -> Status:
    """fail if anything failed, else error, else inconclusive if anything required could not be checked, else pass."""
    statuses = {f.status for f in findings if f.required}
    order: tuple[Status, ...] = ("fail", "error", "inconclusive")
    return next((status for status in order if status in statuses), "pass")

"""A rule's result, and what a static detector saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "inconclusive", "not_applicable", "error"]
Answer = Literal["pass", "fail", "inconclusive", "error", "no_findings"]  # no_findings: only sources were read
Tier = Literal["static", "simulate", "ranks"]


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

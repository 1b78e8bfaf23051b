"""A rule's result, and what a static detector saw."""

from dataclasses import dataclass
from typing import Literal

from .trace.events import Place

Status = Literal["pass", "fail", "inconclusive", "not_applicable", "error"]
Answer = Literal[
    "pass", "fail", "inconclusive", "error", "no_findings"
]  # no_findings: only sources were read
Tier = Literal["static", "simulate", "ranks"]


@dataclass(frozen=True)
class Finding:
    """One clause of the contract, judged. `location`: in the user's code."""

    rule: str
    status: Status
    evidence: str
    measured: float | None = None
    limit: float | None = None
    location: Place | None = None
    fix: str | None = None
    consequence: bool = False
    seconds: float = 0.0
    tier: str = "ranks"
    required: bool = True  # whether it decides: a failure that does not is a warning
    # whether right scripts may be made so too: such a failure needs another one beside it
    suspicion: bool = False
    # rules whose failure follows from what it names, beside those that its rule always explains
    explains: tuple[str, ...] = ()

    @property
    def warns(self) -> bool:
        """Whether something is wrong that leaves the trained model right, or that only a crash in
        the middle of a save shows.
        """
        return self.status == "fail" and not self.required

    @property
    def margin(self) -> float | None:
        """limit / measured: how many times the measured value would fit into the limit."""
        if self.measured is None or self.limit is None or self.measured == 0:
            return None
        return self.limit / self.measured


@dataclass(frozen=True)
class Hit:
    """What a static detector saw in a source: `message` says what, `location` where."""

    rule: str
    message: str
    location: Place


@dataclass(frozen=True, eq=False)
class Suppression:
    """A comment `# fsdp2: ignore[rule] reason`: where it stands, the rules that it names, and the
    lines that it covers.
    """

    location: Place
    rules: tuple[str, ...]
    reason: str
    lines: range

    def covers(self, rule: str, location: Place | None) -> bool:
        """Whether it stands at a place, for a rule, with a reason."""
        if location is None or not self.reason or rule not in self.rules:
            return False
        return location.file == self.location.file and location.line in self.lines

    def message(self) -> str:
        """What a finding says that it covers."""
        return (
            f"suppressed at {self.location.file.rpartition('/')[2]}:{self.location.line}:"
            f" {self.reason}"
        )

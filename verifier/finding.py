"""A rule's result, and what a static detector saw."""

from dataclasses import dataclass
from typing import Literal, Self

from .trace.events import Place

# inconclusive: a run did it, and it could not be judged; not_covered: no run did it
Status = Literal["pass", "fail", "inconclusive", "not_covered", "not_applicable", "error"]
Answer = Literal[
    "pass", "fail", "inconclusive", "error", "no_findings"
]  # no_findings: only sources were read
Tier = Literal["static", "simulate", "ranks"]


class Uncovered(str):
    """Why nothing was judged, where no run did what is to be judged; `part` names it: one of
    config/parts.py, or another word for what a run would have to do.
    """

    part: str

    def __new__(cls, reason: str, part: str) -> Self:
        made = super().__new__(cls, reason)
        made.part = part
        return made


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
    part: str = ""  # of the training, which no run did (Uncovered)
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


@dataclass(frozen=True)
class Remark:
    """What a reviewer should know of a policy, and the line that it is about."""

    text: str
    location: Place | None = None


@dataclass(frozen=True, eq=False)
class Suppression:
    """A comment `# fsdp2: ignore[rule] reason`: where it stands, the rules that it names, and the
    lines that it covers.
    """

    location: Place
    rules: tuple[str, ...]
    reason: str
    lines: range
    refused: str = ""  # why it does not count

    def covers(self, rule: str, location: Place | None) -> bool:
        """Whether it stands at a place, for a rule, with a reason."""
        if location is None or not self.reason or self.refused or rule not in self.rules:
            return False
        return location.file == self.location.file and location.line in self.lines

    def message(self) -> str:
        """What a finding says that it covers."""
        return (
            f"suppressed at {self.location.file.rpartition('/')[2]}:{self.location.line}:"
            f" {self.reason}"
        )

"""What a team has decided about verdicts: rules that are skipped for a time, rules that must be decided, limits that are wider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UserError
from ..finding import Finding
from ..trace.events import Place

BY_HAND = "left out by --skip"


@dataclass(frozen=True)
class Skip:
    """A rule or family that is not judged until a day. `over`: that day is past. `location` and `column` are where it is written."""

    rule: str
    reason: str
    until: str
    over: bool
    location: Place
    column: int


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
                place = f"{skip.location.file}:{skip.location.line}:{skip.column}"
                raise UserError(f"{place}: {skip.rule} is skipped and required; take one of them away")

    @property
    def skipped(self) -> list[str]:
        """The rules and families that are skipped today."""
        return [skip.rule for skip in self.skips if not skip.over]


def open_but_allowed(findings: Sequence[Finding]) -> list[str]:
    """The rules that are open without holding up the verdict."""
    return [f.rule for f in findings if f.status == "inconclusive" and not f.required]

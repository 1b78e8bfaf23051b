"""A team's decisions about verdicts: rules skipped until a date, rules that must not be
inconclusive, limits that are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UserError
from ..finding import Finding
from ..trace.events import Place
from .parts import Part

BY_HAND, BY_QUICK = "option --skip", "option --quick"


@dataclass(frozen=True)
class Skip:
    """A rule or family that is not judged until a day.

    `over`: that day is past. `location` and `column` are where it is written.
    """

    rule: str
    reason: str
    until: str
    over: bool
    location: Place
    column: int


@dataclass(frozen=True)
class Widening:
    """A limit is multiplied by `times`."""

    times: float
    reason: str


@dataclass(frozen=True)
class Policy:
    """Without `required`, no rule may be inconclusive. `require`: what some run must have done."""

    skips: tuple[Skip, ...] = ()
    required: tuple[str, ...] = ()
    require: tuple[Part, ...] = ()
    tolerances: Mapping[str, Widening] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for skip in self.skips:
            if skip.rule in self.required:
                place = f"{skip.location.file}:{skip.location.line}:{skip.column}"
                raise UserError(
                    f"{place}: {skip.rule} is both skipped and required; remove one of the two"
                )

    @property
    def skipped(self) -> list[str]:
        """The rules and families that are skipped today."""
        return [skip.rule for skip in self.skips if not skip.over]


def open_but_allowed(findings: Sequence[Finding]) -> list[str]:
    """The rules that are inconclusive without changing the verdict."""
    return [f.rule for f in findings if f.status == "inconclusive" and not f.required]

"""A team's decisions about verdicts: rules skipped until a date, rules that must not be
inconclusive, limits that are multiplied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from ..finding import Finding, Remark
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
class Checkouts:
    """The folders of a pull request and of its base branch: a file has the same path in both.

    `config`: the configuration of the base branch, where it was named.
    """

    own: Path
    base: Path
    config: Path | None = None

    def before(self, path: Path) -> Path | None:
        """The place of a file in the base branch, if it is one of the pull request's."""
        # as it is named, first: a link may lead away from what the base branch has
        names = (Path(os.path.abspath(path)), path.resolve())  # noqa: PTH100
        inside = (name for name in names if name.is_relative_to(self.own))
        return next((self.base / name.relative_to(self.own) for name in inside), None)


@dataclass(frozen=True)
class Policy:
    """Without `required`, no rule may be inconclusive. `require`: what some run must have done.

    `remarks`: how it differs from that of a base branch; `checkouts`: where that one lies.
    """

    skips: tuple[Skip, ...] = ()
    required: tuple[str, ...] = ()
    require: tuple[Part, ...] = ()
    tolerances: Mapping[str, Widening] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    checkouts: Checkouts | None = None

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

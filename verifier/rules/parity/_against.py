"""A run and the oracle that it is compared with."""

from dataclasses import dataclass
from functools import cached_property

from ...analysis.comparison import Comparison, compare, parted
from ...analysis.limits import Limits, limits
from ..base import Evidence, Rule, Run


@dataclass(frozen=True)
class Against:
    """A full-precision run that is compared with an oracle for a rule.

    `advice`: what to do where their global batches differ.
    """

    rule: Rule
    evidence: Evidence
    run: Run
    oracle: Run
    role: str
    label: str
    advice: str

    @cached_property
    def limits(self) -> Limits:
        return limits(self.evidence, self.rule.name)

    @cached_property
    def parted(self) -> int | None:
        """The first step with other samples."""
        return parted(self.run, self.oracle)

    @cached_property
    def all_steps(self) -> Comparison:
        return compare(self.run, self.oracle)

    @cached_property
    def same_numbers(self) -> bool:
        """Whether all numbers of all steps agree, which shows that the samples were the same.

        Ranks may pad to their own longest sample, so that rows hash otherwise (exam round 6).
        """
        found = self.all_steps
        return found.finite and found.update_size > 0.0 and self.limits.agree(found.measures)

    @cached_property
    def until(self) -> int:
        """The last step that is compared: from other samples on, other numbers prove nothing."""
        if self.parted is not None and not self.same_numbers:
            return self.parted - 1
        return min(self.run.steps(), self.oracle.steps())

    @cached_property
    def found(self) -> Comparison:
        cut = self.parted is not None and not self.same_numbers
        return compare(self.run, self.oracle, self.until) if cut else self.all_steps

    @property
    def measures(self) -> dict[str, float]:
        return self.found.measures

    def worst(self, over: bool) -> str:
        """The measure that is furthest off, for its limit, of those above it or within it."""
        allowed, above = self.limits.allowed, self.limits.over(self.measures)
        names = [name for name in self.measures if (name in above) is over]
        return max(names, key=lambda name: self.measures[name] / allowed[name])

    def off(self, name: str) -> dict[str, float]:
        """What a finding says of a measure."""
        return {"measured": self.measures[name], "limit": self.limits.allowed[name]}

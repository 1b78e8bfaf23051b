"""The policies by which a rule says how it is judged, where it is judged unlike the others.

A rule lists them in `policies`; where a policy counts stands beside it. Each is a class here, with
a docstring: what it says of the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..evidence import Evidence


class Policy:
    """One way to be judged; the subclasses in this module are all that there are."""


@dataclass(frozen=True)
class OnlyOnCpu(Policy):
    """gloo or the CPU is the cause: a script for GPUs has nothing of it (judging/)."""


@dataclass(frozen=True)
class OnlyWarns(Policy):
    """It costs memory or time, or needs a crash: the trained model is right (Rule.failed)."""


@dataclass(frozen=True)
class JudgesExports(Policy):
    """A file that nothing resumes from is enough for it (Rule.applies)."""


@dataclass(frozen=True)
class BesideTheWeights(Policy):
    """It judges what may be lost without an effect on the weights: a resume that ends with the
    right weights leaves it open (judging/), and is not made for it (stages/).
    """


@dataclass(frozen=True)
class ShownBy(Policy):
    """Where its cause has an effect, `rule` fails: where that passes, this one only warns.

    `unless`: whether what `rule` compares with has the same cause, so that its pass says nothing
    (judging/).
    """

    rule: str
    unless: Callable[[Evidence], bool] | None = None


@dataclass(frozen=True)
class SkippedWith(Policy):
    """`--skip` of another family leaves it out too (naming.py)."""

    family: str


@dataclass(frozen=True)
class NeedsSharding(Policy):
    """Of an error of torch: where `fully_shard` was never called, it is open whether it would be
    raised (RaisedRule.unseen).
    """


@dataclass(frozen=True)
class AfterSharding(Policy):
    """Of an error of torch: its text is this rule's only after a call of `fully_shard`
    (RaisedRule.fits).
    """


@dataclass(frozen=True)
class OnlyExplained(Policy):
    """Its failure is a consequence only of a rule that says so, and has seen it in a run; not of
    any cause that happens to fail beside it (judging/).
    """

"""A resume on another number of ranks beside the run that it continues."""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...analysis.comparison import loss_apart, norm_apart
from ...analysis.limits import Limits
from ...analysis.reached import Seen
from ...analysis.syntax import functions, last_name, walk
from ...evidence import Sources
from ...tolerances import CLEARLY
from ...trace import Run
from ...trace.events import Place
from ..base import Evidence
from ..checkpoint._resumed import load_line, saved_at


@dataclass(frozen=True)
class Resumed:
    """A resume on another number of ranks, and the run `base` that it continues after step
    `after` of the train run.
    """

    evidence: Evidence
    base: Run
    run: Run
    after: int
    measure: str  # what is compared in each step: "loss" or "gradient norm"
    limits: Limits

    @property
    def where(self) -> str:
        return f"{self.base.world_size} -> {self.run.world_size} ranks"

    @property
    def offset(self) -> int:
        """The step of `base` after which the resumed run begins."""
        return self.after if self.base is self.evidence.train else 0

    @property
    def asked(self) -> bool:
        """Whether the user asked for this number of ranks: otherwise what a script need not be
        able to do is a warning.
        """
        return self.evidence.course.sizes_chosen

    @cached_property
    def saved(self) -> str:
        return saved_at(self.evidence)

    @cached_property
    def line(self) -> Place | None:
        return load_line(self.evidence, self.run)

    @cached_property
    def position_line(self) -> Place | None:
        """The line that restores the position in the data, where there is one alone, or one that
        the resume has reached; else that which loads.
        """
        found = list(_loaders_restored(self.evidence.sources))
        lines = Seen.of(self.evidence).lines if len(found) > 1 else {}
        found = [one for one in found if one.line in lines.get(one.file, ())] or found
        return found[0] if len(found) == 1 else self.line

    @property
    def allowed(self) -> float:
        return self.limits.allowed[self.measure]

    @cached_property
    def samples(self) -> tuple[Counter[int], Counter[int]]:
        """Those of its first step, and those of the uninterrupted run's."""
        return self.run.global_batch(1), self.base.global_batch(self.offset + 1)

    def apart(self, step: int) -> float:
        between = loss_apart if self.measure == "loss" else norm_apart
        return between(self.run, self.base, step, self.offset)

    @cached_property
    def same_loss(self) -> bool:
        """Whether the first step has the loss of the uninterrupted run's.

        Samples that are cut into other rows (documents packed for each rank) are then the same.
        """
        return self.apart(1) <= self.allowed

    def differences(self) -> Iterator[tuple[float, float]]:
        """(difference, allowed) of each step in which both runs have an objective."""
        mine, theirs = self.samples
        last = min(self.run.steps(), self.base.steps() - self.offset)
        # Where samples are cut into other rows, later batches end elsewhere and are other ones.
        for k in range(1, (last if mine.total() == theirs.total() else 1) + 1):
            if self.run.objective(k) is None or self.base.objective(self.offset + k) is None:
                continue
            apart = self.apart(k)
            # Another order of summation is in every step and grows: later losses of a GAN were
            # 2.3 times the limit apart (exam round 10, kb_09_wgan_history).
            allowed = self.allowed if k == 1 else CLEARLY * self.allowed
            yield math.inf if math.isnan(apart) else apart, allowed


def _loaders_restored(sources: Sources) -> Iterator[Place]:
    """The calls of `load_state_dict` of a loader or a sampler, by its name."""
    for file in sources.project:
        for function in functions(sources.tree(file)):
            for call in (node for node in walk(function) if isinstance(node, ast.Call)):
                owner = getattr(call.func, "value", None)
                if last_name(call.func) != "load_state_dict" or owner is None:
                    continue
                if re.search("loader|sampler", last_name(owner)):
                    at, code = call.lineno, sources.line(file, call.lineno)
                    yield Place(file=file, line=at, function=function.name, code=code)

"""Whether values that a training loop holds agree: between the ranks of a run, or between two runs.

What the rules that compare have in common: a quantity (values by path, all that the loop holds or
some of it), the axis on which it is compared (`across`), the noise up to which two values agree,
when two runs have nothing to compare, and exceptions. The first three are declared here as `Agree`;
that a run is missing or did not complete, and the exceptions, stand with each rule.

    across    sides                                     noise
    ranks     rank 0 and each other rank of train       exact: copies of one computation
    resume    the resumed run and train, steps later    FLOOR and what the perturbed run measured
    world     each resharded run and the one it continues         the same
    single    one process and the full-precision run              the same
    ddp       DDP and the full-precision run                      the same

Other quantities have engines of their own: losses, gradients and updates `comparison`, a resume
that must be bitwise equal `state_after_resume`, printed values and files `ending`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..evidence import Evidence
from ..tolerances import FLOOR, MULTIPLE
from ..trace import Run
from .limits import nudged
from .state import Values, apart, states, whole


@dataclass(frozen=True)
class Sides:
    """A quantity before a step on two sides; `exact`: whether they must have the same bits."""

    where: str
    step: int
    one: Values
    other: Values
    exact: bool = False

    def both(self) -> list[str]:
        """The paths that are there on both sides."""
        return sorted(self.one.keys() & self.other.keys())


@dataclass(frozen=True)
class Agree:
    """That a quantity, chosen from all that a rank holds, agrees on the axes `across`."""

    quantity: Callable[[Values], Values]
    across: tuple[str, ...]

    def sides(self, evidence: Evidence) -> Iterator[Sides]:
        """What is compared, axis by axis and step by step."""
        if "ranks" in self.across:
            yield from self._of_ranks(evidence.trained)
        for axis, runs in AXES.items():
            if axis in self.across:
                for where, run, base, after in runs(evidence):
                    yield from self.of_runs(where, run, base, after)

    def _of_ranks(self, run: Run) -> Iterator[Sides]:
        first, *others = [states(trace) for trace in run.traces]
        for step, values in first.items():
            mine = self._copies(values)
            for rank, other in enumerate(others, 1):
                theirs = self._copies(other.get(step, {}))
                yield Sides(f"on rank 0 and rank {rank}", step, mine, theirs, exact=True)

    def _copies(self, values: Values) -> Values:
        """What a rank has a copy of, and no shard."""
        found = self.quantity(values)
        return {path: held for path, held in found.items() if not held.sharded}

    def of_runs(self, where: str, run: Run, base: Run, after: int) -> Iterator[Sides]:
        """A run, and its base so many steps later."""
        for step in range(1, min(run.steps(), base.steps() - after) + 1):
            mine, theirs = self.quantity(whole(run, step)), self.quantity(whole(base, after + step))
            if mine and theirs:
                yield Sides(where, after + step, mine, theirs)


def among(paths: set[str], values: Values) -> Values:
    """The values of some paths."""
    return {path: held for path, held in values.items() if path in paths}


Runs = Iterator[tuple[str, Run, Run, int]]  # in words, a run, its base, the step it continues


def _resume(evidence: Evidence) -> Runs:
    after = evidence.resumed_after()
    if evidence.resume is not None and after is not None:
        yield "after the resume and without it", evidence.resume, evidence.trained, after


def _world(evidence: Evidence) -> Runs:
    base, after = evidence.resume_full_precision, evidence.resumed_after()
    if base is None or after is None:
        return
    for run in evidence.reshards:
        where = f"on {run.world_size} ranks and on {base.world_size}"
        yield where, run, base, after if base is evidence.trained else 0


def _single(evidence: Evidence) -> Runs:
    run, single = evidence.full_precision, evidence.single
    if run is not None and single is not None:
        yield f"in one process and on {run.world_size} ranks", single, run, 0


def _ddp(evidence: Evidence) -> Runs:
    run, ddp = evidence.full_precision, evidence.reference
    if run is not None and ddp is not None:
        yield "with DDP and with fully_shard", ddp, run, 0


AXES: dict[str, Callable[[Evidence], Runs]] = {
    "resume": _resume,
    "world": _world,
    "single": _single,
    "ddp": _ddp,
}


@dataclass(frozen=True)
class Noise:
    """How far values may be apart: a multiple of what weights one unit in the last place apart
    make of them, and the rounding of a few additions in another order; `times` as a user asks.
    """

    moved: dict[str, float]
    times: float = 1.0

    def limit(self, path: str) -> float:
        return self.times * (MULTIPLE * self.moved.get(path, 0.0) + FLOOR)


def noise(evidence: Evidence, times: float = 1.0) -> Noise:
    """The noise of each value, from the perturbed run."""
    a, b = evidence.perturbed, nudged(evidence)
    moved: dict[str, float] = {}
    if a is None or b is None:
        return Noise(moved, times)
    for one in Agree(dict, ()).of_runs("", a, b, 0):
        for path in one.both():
            moved[path] = max(moved.get(path, 0.0), apart(one.one[path], one.other[path]))
    return Noise(moved, times)

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...analysis.agreement import Agree, Noise, among, noise
from ...analysis.applicability import no_evaluation
from ...analysis.copies_of_weights import copy_apart
from ...analysis.measured import apart as differ
from ...analysis.measured import measured, of_both, shown
from ...analysis.measured import noise as measured_noise
from ...analysis.state import apart, divided, evaluated, handed_on, states
from ...analysis.syntax import assigned_at, functions
from ...evidence import Sources
from ...tolerances import FLOOR, MULTIPLE
from ...trace.events import Held, Place, State
from ..base import Evidence, Finding, Run, Uncovered
from ._one_process import OneProcessRule

UPDATE_OF_A_COPY = (
    "Update a copy of the weights (an average) once after each optimizer step, not after each"
    " micro-batch, whose number depends on the number of ranks."
)


class EvaluationSameInOneProcess(OneProcessRule):
    """A number that an evaluation computes is the same on N ranks and in one process.

    Why: a mean of the ranks' means weighs the samples of a short last batch more, a sampler that
    pads counts some twice, and a number that is not reduced is that of one rank's part. Checkpoints
    and learning rates are chosen by it.
    Wrong:
        value = torch.stack([loss_of(model, batch) for batch in loader]).mean()  # of this rank
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
    Right:
        total = torch.zeros(2)
        for batch in loader:
            total += torch.tensor([loss_of(model, batch) * len(batch), len(batch)])
        dist.all_reduce(total)
        value = total[0] / total[1]
    Fix: Sum values and counts over all batches and ranks, then divide once; give every sample to
    exactly one rank.
    Source: law L10: the probe records the numbers that the training loop holds and that change only
    with forwards without gradients, and those that calls without a training step return, on all
    ranks and in one process from the same weights.
    """

    # The best of its numbers, and what is chosen by them, is printed at the end.
    explains = ("ending-same-in-one-process",)

    def applies(self, evidence: Evidence) -> str:
        seen = any(record.evaluations for record in evidence.trained.places(State))
        run, sources = evidence.trained, evidence.sources
        there = seen and (evaluated(run, sources) or measured(run, sources))
        reason = "no number was computed in an evaluation within the steps that were run"
        return "" if there else no_evaluation(evidence, reason)

    def compare(self, evidence: Evidence, run: Run, single: Run) -> Finding:
        paths = evaluated(run, evidence.sources)
        times = evidence.times(self.name)
        seen = list(_held(evidence, run, paths, noise(evidence, times)))
        # A number that differs between ranks and goes into another one is a part of what is
        # reduced afterwards (exam round 3, i_06_plateau_schedule and j_02_grpo_groups).
        results = [one for one in seen if not one.part]
        wrong = [one for one in results if one.apart > one.limit]
        wrong = [one for one in wrong if not (one.never_repeats or one.is_a_sum)]
        compared = len(results)
        if not wrong:
            returned = list(_returned(evidence, run, single, times))
            returned = [one for one in returned if not (one.never_repeats or one.is_a_sum)]
            wrong = [one for one in returned if one.apart > one.limit]
            compared += len(returned)
        if wrong:
            worst = max(wrong, key=lambda one: one.apart / one.limit)
            return self._differs(worst, run, single)
        return self._nothing_wrong(compared, len(seen) > len(results), bool(paths))

    def _differs(self, worst: "Number", run: Run, single: Run) -> Finding:
        """A failure, and whether a copy of the weights is its cause."""
        given = "with the same weights"
        more: dict[str, Any] = {}
        if other := copy_apart(run, single, worst.step):
            given, more = f"with the same trained weights, but {other}", {"fix": UPDATE_OF_A_COPY}
        text = (
            f"before step {worst.step}: {worst.what} = {worst.here:.6g} on {run.world_size} ranks,"
            f" {worst.there:.6g} in one process {given} (allowed: {worst.limit:.1g} apart)"
        )
        return self.failed(text, worst.line, measured=worst.apart, limit=worst.limit, **more)

    def _nothing_wrong(self, compared: int, parts: bool, evaluates: bool) -> Finding:
        """A pass, where something was compared."""
        if compared:
            return self.passed(f"{compared} numbers of evaluations are those of one process")
        if parts:
            what = (
                "every number that was seen is one rank's part, from which the script computes"
                " another"
            )
            return self.unknown(Uncovered(what, "evaluation"))
        if not evaluates:
            what = "the calls that make numbers in one process make others, or none"
            return self.unknown(Uncovered(what, "evaluation"))
        return self.unknown("no step of the run of one process holds the numbers of the evaluation")


@dataclass(frozen=True)
class Number:
    """A number of an evaluation on N ranks and in one process.

    `part`: whether it is one rank's part of a number. `never_repeats`: whether it is not the same
    with DDP on the same ranks either, such as a time. `is_a_sum`: whether it is a sum or mean over
    ranks, of which the script or a caller makes the other.
    """

    step: int
    what: str
    here: float | None
    there: float | None
    apart: float
    limit: float
    part: bool = False
    never_repeats: bool = False
    is_a_sum: bool = False
    line: Place | None = None


def _held(evidence: Evidence, run: Run, paths: set[str], known: Noise) -> Iterator[Number]:
    """The numbers that the training loop holds in both runs."""
    sources, numbers = evidence.sources, partial(among, paths)
    never_repeat = {
        (sides.step, path)
        for sides in Agree(numbers, ("ddp",)).sides(evidence)
        for path in sides.both()
        if apart(sides.one[path], sides.other[path]) > known.limit(path)
    }
    for sides in Agree(numbers, ("single",)).sides(evidence):
        step = sides.step
        for path in sides.both():
            there, here, limit = sides.one[path], sides.other[path], known.limit(path)
            value = apart(here, there)
            # A sum over ranks that is divided where it is read is exactly so many times that of
            # one process (exam round 5, p_10_rollback_root and p_16_schedule_free).
            summed = value > limit and divided(sources, path)
            yield Number(
                step,
                f"`{path}`",
                here.value,
                there.value,
                value,
                limit,
                part=_local(run, step, path) and handed_on(sources, path),
                never_repeats=(step, path) in never_repeat,
                line=_assigned(sources, path),
                is_a_sum=summed and apart(here, _times(there, run)) <= limit,
            )


def _returned(evidence: Evidence, run: Run, single: Run, times: float) -> Iterator[Number]:
    """The numbers that calls return in both runs."""
    mine, theirs = measured(run, evidence.sources), measured(single, evidence.sources)
    ddp = evidence.reference
    again = measured(ddp, evidence.sources) if ddp is not None else {}
    known = measured_noise(evidence)
    for key in of_both(mine, theirs):
        step, function, path = key
        here, there = mine[key].value, theirs[key].value
        limit = times * (MULTIPLE * known.get(key[1:], 0.0) + FLOOR)
        # A call may return the sum or the mean of the ranks' numbers, of which its caller makes
        # the result.
        sums = (there * run.world_size, there / run.world_size)
        yield Number(
            step,
            f"{function}() makes `{path}`",
            here,
            there,
            differ(here, there),
            limit,
            never_repeats=key in again and differ(here, again[key].value) > limit,
            # What the call itself prints is its result: no caller makes another of it
            # (a validation loss divided by the global count and then averaged over ranks).
            is_a_sum=any(differ(here, value) <= limit for value in sums)
            and not shown(evidence.sources, function, path),
            line=mine[key].at_line,
        )


def _assigned(sources: Sources, path: str) -> Place | None:
    """The line that assigns the variable of a path, `fit.val['loss']`, in its function."""
    names = re.match(r"(\w+)\.(\w+)", path)
    for file in sources.project if names else ():
        for function in functions(sources.tree(file)):
            if (
                names
                and function.name == names[1]
                and (lines := assigned_at(function, function.name, names[2]))
            ):
                return Place(file=file, line=lines[-1], function=names[1], code="")
    return None


def _times(held: Held, run: Run) -> Held:
    """A number times the number of ranks."""
    return replace(held, value=held.value * run.world_size) if held.value is not None else held


def _local(run: Run, step: int, path: str) -> bool:
    """Whether the ranks have different values of a number."""
    values = [
        one.value
        for trace in run.traces
        if (one := states(trace).get(step, {}).get(path)) is not None
    ]
    return len(set(values)) > 1

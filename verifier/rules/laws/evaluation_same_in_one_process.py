from dataclasses import replace

from ...analysis.comparison import FLOOR, MULTIPLE
from ...analysis.measured import apart as differ
from ...analysis.measured import measured, of_both
from ...analysis.measured import noise as measured_noise
from ...analysis.state import apart, divided, evaluated, handed_on, states, whole
from ...trace.events import Held, State
from ..base import Evidence, Finding, Run
from ._one_process import OneProcessRule


class EvaluationSameInOneProcess(OneProcessRule):
    """A number that an evaluation computes is the same on N ranks and in one process.

    Why: a mean of the ranks' means weighs the samples of a short last batch more, a sampler that
    pads counts some twice, and a number that is not reduced is that of one rank's part. Checkpoints
    and learning rates are chosen by it.
    Wrong:
        value = torch.stack([loss_of(model, batch) for batch in loader]).mean()  # this rank's batches
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

    def applies(self, evidence: Evidence) -> str:
        seen = any(record.evaluations for record in evidence.trained.places(State))
        run, sources = evidence.trained, evidence.sources
        there = seen and (evaluated(run, sources) or measured(run, sources))
        return (
            ""
            if there
            else "no number was computed in an evaluation within the steps that were run"
        )

    def compare(self, evidence: Evidence, run: Run, single: Run) -> Finding:
        paths = evaluated(run, evidence.sources)
        allowed, compared, parts = self.allowed(evidence, paths), 0, 0
        worst, found = 0.0, None
        for step in range(1, min(run.steps(), single.steps()) + 1):
            mine, theirs = whole(run, step), whole(single, step)
            again = whole(evidence.reference, step) if evidence.reference is not None else {}
            for path in sorted(paths & mine.keys() & theirs.keys()):
                if _local(run, step, path) and handed_on(evidence.sources, path):
                    parts += 1  # of a number that is reduced afterwards
                    continue
                compared += 1
                limit, value = allowed[path], apart(mine[path], theirs[path])
                if path in again and apart(mine[path], again[path]) > limit:
                    continue  # not the same with DDP either, such as a time
                if (
                    value > limit
                    and divided(evidence.sources, path)
                    and apart(mine[path], _times(theirs[path], run)) <= limit
                ):
                    continue  # a sum over ranks
                if value > max(1.0, worst) * limit:
                    numbers = (
                        f"{mine[path].value:.6g} on {run.world_size} ranks,"
                        f" {theirs[path].value:.6g} in one process"
                    )
                    text = (
                        f"before step {step}: `{path}` = {numbers} with the same weights (allowed:"
                        f" {limit:.1g} apart)"
                    )
                    worst, found = value / limit, self.failed(text, measured=value, limit=limit)
        if found is None:
            returned, found = self._returned(evidence, run, single)
            compared += returned
        if found is not None:
            return found
        if parts and not compared:
            what = (
                "every number that was seen is one rank's part, from which the script computes"
                " another"
            )
            return self.not_applicable(what)
        if not compared and not paths:
            return self.not_applicable(
                "the calls that make numbers in one process make others, or none"
            )
        if not compared:
            return self.unknown(
                "no step of the run of one process holds the numbers of the evaluation"
            )
        return self.passed(f"{compared} numbers of evaluations are those of one process")

    def _returned(self, evidence: Evidence, run: Run, single: Run) -> tuple[int, Finding | None]:
        """How many numbers that calls return were compared, and the finding on the one furthest
        off.
        """
        mine, theirs = measured(run, evidence.sources), measured(single, evidence.sources)
        again = (
            measured(evidence.reference, evidence.sources) if evidence.reference is not None else {}
        )
        known, times = measured_noise(evidence), evidence.times(self.name)
        compared, worst, found = 0, 1.0, None
        for key in of_both(mine, theirs):
            here, there = mine[key].value, theirs[key].value
            limit = times * (MULTIPLE * known.get(key[1:], 0.0) + FLOOR)
            sums = (
                there * run.world_size,
                there / run.world_size,
            )  # of which the caller makes a mean
            if (key in again and differ(here, again[key].value) > limit) or any(
                differ(here, x) <= limit for x in sums
            ):
                continue
            compared += 1
            if differ(here, there) > worst * limit:
                step, function, path = key
                text = (
                    f"before step {step}: {function}() makes `{path}` = {here:.6g} on"
                    f" {run.world_size} ranks, {there:.6g} in one process with the same weights"
                    f" (allowed: {limit:.1g} apart)"
                )
                worst = differ(here, there) / limit
                found = self.failed(
                    text, mine[key].at_line, measured=differ(here, there), limit=limit
                )
        return compared, found


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

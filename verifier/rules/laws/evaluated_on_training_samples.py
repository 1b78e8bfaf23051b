from ...analysis.applicability import no_evaluation
from ...tolerances import HELD_OUT
from ...trace.events import Evaluated, Micro
from ..base import Evidence, Finding, Rule, count


class EvaluatedOnTrainingSamples(Rule):
    """No rank trains on the samples that another holds out for evaluation.

    Why: a split that each rank draws for itself holds out other samples on every rank. What one
    rank evaluates on, another trains on, and there is one model: its evaluation is too good, and so
    are the choices that depend on it.
    Wrong:
        train, held_out = torch.utils.data.random_split(dataset, [0.9, 0.1])  # on every rank
    Right:
        generator = torch.Generator().manual_seed(0)
        train, held_out = torch.utils.data.random_split(dataset, [0.9, 0.1], generator=generator)
    Fix: Split the data with a seed that all ranks share, before any part is taken by rank.
    Source: law L9: the probe hashes the samples of each step and of each forward without gradients.
    A rank that evaluates on samples of its own training, or on some that no rank trains on only by
    chance, does so on purpose: no breach.
    """

    def applies(self, evidence: Evidence) -> str:
        if len(evidence.trained.sample_ranks) < 2:
            return "not applicable with one data-parallel rank"
        seen = any(trace.first(Evaluated) for trace in evidence.trained.traces)
        reason = "nothing was evaluated within the steps that were run"
        return "" if seen else no_evaluation(evidence, reason)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        traces = [trace for trace in run.traces if trace.rank in run.sample_ranks]
        trained = [{row for micro in trace.of(Micro) for row in micro.rows} for trace in traces]
        everyone = set().union(*trained)
        known, samples = set[int](), set[int]()
        # Two evaluations (of held-out samples, and of the training's own for a log) are judged
        # apart by their lines: the second would hide the first.
        for lines in dict.fromkeys(_lines(record) for record in run.all(Evaluated)):
            records = [
                [record for record in trace.of(Evaluated) if _lines(record) == lines]
                for trace in traces
            ]
            evaluated = [{row for record in own for row in record.rows} for own in records]
            both = set().union(*evaluated) & everyone
            known, samples = known | both, samples.union(*evaluated)
            held_out = all(
                rows.isdisjoint(own) for rows, own in zip(evaluated, trained, strict=True)
            )
            elsewhere = sum(len(rows & everyone) for rows in evaluated)
            # If one split were shared, each sample that is trained on at all would be on this rank
            # with probability 1/ranks; so often elsewhere and never here is no chance (law L9).
            if held_out and (1 - 1 / len(traces)) ** elsewhere < HELD_OUT:
                what = (
                    f"{len(both)} of the {len(set().union(*evaluated))} samples that ranks hold out"
                    " for evaluation"
                )
                place = next(record.at_line for own in records for record in own)
                return self.failed(f"{what} are trained on, each by other ranks alone", place)
        if known:
            some = f"{len(known)} of {count(len(samples), 'evaluated sample')}"
            # A script may evaluate on its training samples on purpose (a training accuracy): where
            # a rank sees samples of its own too, nothing is wrong.
            return self.not_applicable(f"{some} are trained on: the script may intend it")
        return self.passed(f"none of {count(len(samples), 'evaluated sample')} is trained on")


def _lines(record: Evaluated) -> tuple[tuple[str, int], ...]:
    return tuple((file, line) for file, line in record.lines)

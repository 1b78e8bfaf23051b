from ...analysis.comparison import FLOOR, MULTIPLE, compare, incomparable, limits
from ...analysis.state import apart, evaluated, handed_on, noise, states, whole
from ...trace.events import State
from ..base import Evidence, Finding, Rule, Run


class EvaluationSameInOneProcess(Rule):
    """A number that an evaluation computes is the same on N ranks and in one process.

    Why: a mean of the ranks' means weighs the samples of a short last batch more, a sampler that pads counts some twice,
    and a number that is not reduced is that of one rank's part. Checkpoints and learning rates are chosen by it.
    Wrong:
        value = torch.stack([loss_of(model, batch) for batch in loader]).mean()  # this rank's batches
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
    Right:
        total = torch.zeros(2)
        for batch in loader:
            total += torch.tensor([loss_of(model, batch) * len(batch), len(batch)])
        dist.all_reduce(total)
        value = total[0] / total[1]
    Fix: Sum values and counts over all batches and ranks, then divide once; give every sample to exactly one rank.
    Source: law L10: the probe records the numbers that the training loop holds and that change only with forwards
    without gradients, on all ranks and in the run of one process from the same weights.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def applies(self, evidence: Evidence) -> str:
        seen = any(record.evaluations for record in evidence.trained.places(State))
        return (
            ""
            if seen and evaluated(evidence.trained, evidence.sources)
            else "no number was computed in an evaluation within the steps that were run"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.full_precision, evidence.single
        if run is None or single is None:
            return self.unknown(evidence.missing.get("single", "no run of one process was made"))
        if (reason := incomparable(run, single, "single", "one process")) is not None:
            return self.unknown(reason)
        if not limits(evidence, self.name).agree(compare(run, single).measures):
            return self.unknown(
                "losses, gradients or weights differ from those of one process already: see matches-single-process"
            )
        known, compared, parts, worst = noise(evidence), 0, 0, (0.0, 0.0, "", 0)
        for step in range(1, min(run.steps(), single.steps()) + 1):
            mine, theirs = whole(run, step), whole(single, step)
            again = whole(evidence.reference, step) if evidence.reference is not None else {}
            for path in sorted(evaluated(run, evidence.sources) & mine.keys() & theirs.keys()):
                if _local(run, step, path) and handed_on(evidence.sources, path):
                    parts += 1  # of a number that is reduced afterwards
                    continue
                compared += 1
                limit = evidence.times(self.name) * (MULTIPLE * known.get(path, 0.0) + FLOOR)
                value = apart(mine[path], theirs[path])
                if path in again and apart(mine[path], again[path]) > limit:
                    continue  # not the same with DDP either, such as a time
                if value > limit and value / limit > worst[0]:
                    text = f"`{path}` = {mine[path].value:.6g} on {run.world_size} ranks, {theirs[path].value:.6g} in one process"
                    worst = (value / limit, value, text, step)
        if worst[2]:
            limit = worst[1] / worst[0]
            return self.failed(
                f"before step {worst[3]}: {worst[2]} with the same weights (allowed: {limit:.1g} apart)",
                measured=worst[1],
                limit=limit,
            )
        if parts and not compared:
            return self.not_applicable(
                "every number that was seen is one rank's part, from which the script computes another"
            )
        if not compared:
            return self.unknown("no step of the run of one process holds the numbers of the evaluation")
        return self.passed(f"{compared} numbers of evaluations are those of one process")


def _local(run: Run, step: int, path: str) -> bool:
    """Whether the ranks have different values of a number."""
    values = [one.value for trace in run.traces if (one := states(trace).get(step, {}).get(path)) is not None]
    return len(set(values)) > 1

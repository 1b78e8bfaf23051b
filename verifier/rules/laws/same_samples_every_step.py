from ...tolerances import SAME_STEPS
from ...trace.events import LoaderStarted
from ..base import Evidence, Finding, Rule, Run, Uncovered, count


class SameSamplesEveryStep(Rule):
    """A step does not train on the same samples as the step before while others are there.

    Why: an iterator that is made again in each step, or an index that does not advance, trains on
    the first batch for ever. The loss falls faster than it should.
    Wrong:
        for step in range(steps):
            batch = next(iter(loader))  # the first batch, unless the loader shuffles
    Right:
        for step, batch in zip(range(steps), loader):
            ...
    Fix: Make the iterator once before the loop, or compute the position from the step.
    Source: ZhaoJ9014/face.evoLVe PR#39; wandb/examples#444; law L9: the probe hashes the samples of
    each step, and knows how long the data sets of its loaders are.
    """

    def applies(self, evidence: Evidence) -> str:
        if not _available(evidence.trained):
            return "no DataLoader over a data set of known length"
        few = Uncovered(f"fewer than {SAME_STEPS} steps were made", "whether samples repeat")
        return "" if evidence.trained.steps() >= SAME_STEPS else few

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        batches = [run.global_batch(step) for step in range(1, run.steps() + 1)]
        if not batches[0]:
            reason = "the model was given no tensor whose rows could be distinguished"
            return self.unknown(Uncovered(reason, "whether samples repeat"))
        distinct, there = len(set().union(*batches)), _available(run)
        samples = count(distinct, "sample")
        if any(batch != batches[0] for batch in batches):
            return self.passed(f"{samples} in {count(len(batches), 'step')}")
        # Full-batch training uses every sample there is in every step: right.
        if there <= distinct:
            return self.passed(f"every step trains on all {samples} that there are")
        what = f"all {len(batches)} steps train on the same {samples}, of {there} in the data set"
        return self.failed(what, run.data_line())


def _available(run: Run) -> int:
    """The length of the largest data set that a loader of the training loop goes through."""
    return max((record.samples for record in run.places(LoaderStarted)), default=0)

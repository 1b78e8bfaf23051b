from pathlib import PurePath

from ...analysis.applicability import begins_elsewhere
from ...analysis.not_covered import never_set
from ...analysis.state import apart, attribute, evolving, whole
from ...analysis.state_after_resume import Beginning, beginning, holder, named
from ...analysis.unusual_parallelism import saved_in_a_step
from ...tolerances import LATER, LEAST_ELEMENTS, SAME_STATE
from ..base import Evidence, Finding, Rule, Run, some
from ..checkpoint._resumed import load_line, saved_at
from ..policies import BesideTheWeights

_NEVER_SET = (
    "See why the resume does not come to the branch that sets it (what its condition reads is empty"
    " or false there), or save what is named here and load it."
)


class StateRestored(Rule):
    """A resumed run has all the state that the uninterrupted run has at the same step.

    Why: what a loop carries from step to step beside model and optimizer is lost unless it is
    saved: a moving average of the weights, running statistics, the best score so far, a patience
    counter, a schedule. If it feeds no loss, the trajectory after the resume is the same, and only
    the exported or the selected model is wrong.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}  # and the average?
        dcp.save(state, checkpoint_id=path)
    Right:
        state = {"model": model_state, "optimizer": optimizer_state, "average": average}
        dcp.save(state, checkpoint_id=path)
    Fix: Save what is named here in the checkpoint and load it before training continues.
    Source: law L6: at the first forward of each step every rank records buffers, modules,
    schedulers, scalers, tensors and numbers that the frames of its training loop reach. Numbers
    count only if a condition that does more than log depends on them, and tensors of one element
    likewise.
    """

    needs = frozenset({"train", "resume"})
    policies = (BesideTheWeights(),)

    def judge(self, evidence: Evidence) -> Finding:
        train, resume, after = evidence.trained, evidence.resume, evidence.resumed_after()
        if resume is None:
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        if reason := begins_elsewhere(train, resume, after):
            return self.unknown(reason)
        # After a save in mid-step the resumed run makes only the rest of it: what the loop carries
        # then is not that of a whole step (exam round 6 t_15_token_budget).
        if reason := saved_in_a_step(evidence):
            return self.not_applicable(reason)
        if not whole(resume, 1) or not whole(train, after + 1):
            return self.unknown(
                f"no state was recorded at step {after + 1} of both the train run and the"
                " resumed run"
            )
        begins = beginning(evidence, train, resume, after + 1)
        # If nothing that decides or is averaged changes from step to step, there is nothing to
        # restore: numbers that only a log reads may start again (test_laws.py
        # test_what_only_a_log_reads_may_start_again).
        if not begins.compared:
            what = (
                "nothing that the loop carries beside model and optimizer changes from step to step"
            )
            return self.not_applicable(what)
        if begins.lost:
            return self._lost(evidence, begins, after + 1)
        if parted := parting(train, resume, after):
            what = (
                "what the resumed run makes of its state is not what the uninterrupted run makes"
                " of it"
            )
            return self.failed(
                f"{what}: {some(parted, 4)}{saved_at(evidence)}", load_line(evidence)
            )
        return self.passed(
            f"{begins.compared} values that change from step to step are the same after the resume"
        )

    def _lost(self, evidence: Evidence, begins: Beginning, step: int) -> Finding:
        what = (
            f"step {step} starts after the resume with other values than without it:"
            f" {some(begins.lost, 4)}{saved_at(evidence)}"
        )
        # What a branch after the load would set (fairseq2: the best score, from a list of
        # checkpoints that is empty).
        missed = never_set(evidence, {attribute(path) for path in begins.paths})
        if missed is None:
            return self.failed(what, load_line(evidence))
        at = f"{PurePath(missed.file).name}:{missed.block.under or missed.block.first}"
        what += f"; no run came to what sets it, behind `{missed.code}` ({at})"
        return self.failed(what, load_line(evidence), fix=_NEVER_SET)


def parting(train: Run, resume: Run, after: int) -> list[str]:
    """The state, in words, that was restored and is another one steps later, while the weights are
    still the same ones.
    """
    first = whole(resume, 1)
    paths = evolving(train) & evolving(resume) & first.keys()
    # Tensors below 16 elements are sums for a log rather than an average of weights: they are
    # compared at the start alone.
    paths = {path for path in paths if first[path].sketch and first[path].numel >= LEAST_ELEMENTS}
    for step in range(1, LATER):
        mine, theirs = whole(resume, step + 1), whole(train, after + step + 1)
        # State is compared while samples and weights are still the same ones: after the first
        # other update it differs for that reason.
        same = all(_same_step(train, resume, after, k) for k in (step, step + 1))
        if not (mine and theirs and same):
            break
        pairs = {path: (mine[path], theirs[path]) for path in sorted(mine.keys() & theirs.keys())}
        differ = {
            p: pairs[p]
            for p in pairs
            # Tensors in the memory of the parameters are the weights themselves, which other rules
            # compare.
            if p in paths and not theirs[p].live and apart(*pairs[p]) > SAME_STATE
        }
        if differ:
            around = {above for path in differ for above in _above(path)}
            numbers = {
                p: pair
                for p, pair in pairs.items()
                if holder(p) in around and pair[0].value is not None
            }
            return named(
                differ | {p: pair for p, pair in numbers.items() if pair[0].value != pair[1].value}
            )
    return []


def _same_step(train: Run, resume: Run, after: int, step: int) -> bool:
    """Whether a step of the resumed run has the samples of the uninterrupted run's and makes the
    same weights.
    """
    pairs = list(zip(train.traces, resume.traces, strict=True))
    reached = all(len(a.stepped) >= after + step and len(b.stepped) >= step for a, b in pairs)
    same_batch = resume.global_batch(step) == train.global_batch(after + step)
    return (
        reached
        and same_batch
        and all(
            a.stepped[after + step - 1].weights == b.stepped[step - 1].weights for a, b in pairs
        )
    )


def _above(path: str) -> list[str]:
    """All that holds a value, from the inside: `main.ema['head.weight']` -> `main.ema`, `main`."""
    found = [path]
    while holder(found[-1]) != found[-1]:
        found.append(holder(found[-1]))
    return [one for one in found[1:] if "." in one]

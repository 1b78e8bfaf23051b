import math
from collections import Counter
from collections.abc import Callable
from enum import Enum

from ...analysis.applicability import begins_elsewhere
from ...analysis.comparison import compare, incomparable
from ...analysis.ending import resharded_to_the_same_end
from ...analysis.limits import limits, undecided
from ...analysis.root_cause import root_cause
from ...analysis.unusual_parallelism import cut_otherwise, saved_in_a_step
from ...tolerances import RESHARD_GROWN, RESHARD_SAMPLES, SAME_END
from ...trace import Run, Sketch, difference
from ...trace.events import Micro
from ..base import Evidence, Finding, Rule, some
from ..checkpoint._resumed import RAISED
from ._resharded import Resumed


class StateOnly(Enum):
    """Why the state of a resumed run is compared, and its losses are not."""

    SAVED_IN_A_STEP = 1
    OTHER_BATCH = 2
    DRAWN_BY_RANK = 3
    UNEVEN = 4


class ReshardKeepsTrajectory(Rule):
    """A checkpoint resumed at another world size continues with the same state and losses.

    Why: state kept per rank (one file a rank, a position in each rank's own data stream) does not
    fit another world size: samples are lost or repeated, or the run does not start. Unless
    --reshard-to asks for the size, these two are warnings: state or losses that differ are not.
    Wrong:
        torch.save(model.state_dict(), f"{path}.rank{dist.get_rank()}")  # this rank's shards
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Fix: Save through DCP (which reshards), and keep the data position in global samples.
    Source: the same checkpoint loaded at other world sizes, compared with the run that made it: the
    state, the samples and the losses of the next steps, after the first of which another order of
    summation may have grown.
    """

    names_a_cause = False
    needs = frozenset(
        {"train", "reference", "perturbed", "single", "resume_full_precision", "reshard"}
    )

    def judge(self, evidence: Evidence) -> Finding:
        found = self._judge_steps(evidence)
        # Several optimizers may count their steps otherwise on other ranks, so that equal numbers
        # are not equal steps (exam round 11, mb_11_forward_forward): the end decides.
        if found.status == "fail" and (far := resharded_to_the_same_end(evidence)) <= SAME_END:
            same = (
                f"the resumed runs end with the weights of the uninterrupted one ({far:.1e} apart,"
                f" allowed: {SAME_END:.0e})"
            )
            return self.passed(
                f"{same}: their steps were only counted otherwise", measured=far, limit=SAME_END
            )
        return found

    def _judge_steps(self, evidence: Evidence) -> Finding:
        base, after = evidence.resume_full_precision, evidence.resumed_after()
        if not evidence.reshards or base is None:
            return self.unknown(evidence.missing.get("reshard", "no other world size was run"))
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        # A script that back-propagates sums and scales the gradients afterwards has losses that
        # mean another thing on other ranks (exam round 3, g_12_scale_after).
        measure = "gradient norm" if _over_one_process(evidence) == {"loss"} else "loss"
        found = limits(evidence, self.name)
        resumes = [Resumed(evidence, base, run, after, measure, found) for run in evidence.reshards]
        only: list[StateOnly | None] = []
        for one in resumes:
            answers = (case(self, one) for case in CASES)
            outcome = next((answer for answer in answers if answer is not None), None)
            if isinstance(outcome, Finding):
                return outcome
            only.append(outcome)
        other = [
            one for one, why in zip(resumes, only, strict=True) if why is StateOnly.OTHER_BATCH
        ]
        # Of the sizes that nobody asked for one that can be compared is enough (exam round 6).
        if other and (evidence.course.sizes_chosen or len(other) == len(resumes)):
            return self.unknown(
                f"{other[0].where}: the state is as saved, but the global batch depends on the"
                " number of ranks"
            )
        return self._of_losses(resumes, only)

    def _of_losses(self, resumes: list[Resumed], only: list[StateOnly | None]) -> Finding:
        """The finding on runs that have the state of the uninterrupted one."""
        first = resumes[0]
        pairs = [(0.0, first.allowed)]
        for one, why in zip(resumes, only, strict=True):
            pairs += one.differences() if why is None else ()
        worst, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
        ranks, measure = "; ".join(one.where for one in resumes), first.measure
        what = "losses" if measure == "loss" else "gradient norms"
        if worst <= limit:
            text = f"{ranks}: same state, same samples, {what} within {worst:.1e}"
            if StateOnly.DRAWN_BY_RANK in only:
                by_rank = "the samples depend on the number of ranks without a resume, too"
                text = f"{ranks}: same state; {by_rank}"
            return self.passed(text, measured=worst, limit=limit)
        if not first.limits.differ({measure: worst}):
            return self.unknown(f"{ranks}: {undecided(measure, worst, first.limits)}")
        text = f"{what} after resharding differ by {worst:.2g} ({ranks}; allowed {limit:.1g})"
        grown = worst <= RESHARD_GROWN * limit and _over_one_process(first.evidence) == set()
        return self.failed(
            f"{text}{first.saved}", first.line, measured=worst, limit=limit, suspicion=grown
        )


def _stopped(rule: Rule, one: Resumed) -> Finding | None:
    """Files of each rank that other ranks cannot read stop a run: a warning unless asked for.

    One step is not late: the run may stop when one of two optimizers has stepped (exam round 9,
    hd_15_graph_muon).
    """
    if one.run.completed:
        return None
    cause, late = root_cause(one.run), one.run.steps() > 1
    text = f"{one.where}: the run failed: {cause.text}"
    required = one.asked or late
    suspicion = late and not one.asked
    return rule.failed(text, cause.location, fix=RAISED, required=required, suspicion=suspicion)


def _begun_elsewhere(rule: Rule, one: Resumed) -> Finding | None:
    """Peers that take turns may be saved in mid-round: the resumed run begins with another
    optimizer's step (exam round 2, e_15_mutual_learning).
    """
    reason = begins_elsewhere(one.base, one.run, one.offset)
    return rule.unknown(f"{one.where}: {reason}") if reason else None


def _other_state(rule: Rule, one: Resumed) -> Finding | None:
    """Weights or optimizer state are not as saved.

    Initial weights are a start from scratch, which a script may choose on another number of ranks:
    a warning unless asked for (exam round 4).
    """
    wrong = _state_differs(one.base, one.run, one.offset + 1)
    if wrong is None:
        return None
    ignored = one.after > 0 and _state_differs(one.evidence.trained, one.run, 1) is None
    if ignored:
        wrong = "the checkpoint is ignored, and training begins at the initial weights"
    return rule.failed(
        f"{one.where}: {wrong}{one.saved}", one.line, required=one.asked or not ignored
    )


def _saved_in_a_step(rule: Rule, one: Resumed) -> StateOnly | None:
    """The resumed run makes the rest of a step that a checkpoint from the middle of it has begun:
    its losses are of fewer micro-batches (exam round 6, t_15_token_budget).
    """
    return StateOnly.SAVED_IN_A_STEP if saved_in_a_step(one.evidence) else None


def _other_batch(rule: Rule, one: Resumed) -> Finding | StateOnly | None:
    """A global batch that depends on the ranks has other samples in each step; only samples of an
    epoch that come twice or are left out show a position that was saved of one rank.
    """
    mine, theirs = one.samples
    if mine.total() == theirs.total() or one.same_loss:
        return None
    if wrong := _displaced(one):
        return rule.failed(
            f"{one.where}: {wrong}{one.saved}", one.position_line, required=one.asked
        )
    return StateOnly.OTHER_BATCH


def _other_samples(rule: Rule, one: Resumed) -> Finding | StateOnly | None:
    """The next step has other samples: a warning unless asked for, since a position in each rank's
    own lane has no meaning on other ranks (exam round 4, k_01_token_lanes).

    Noise or masks of each rank's generator are other samples by design, if they are so in one
    process from scratch, too (exam round 6, w_05_diffusion_rng and t_05_mlm_rng).
    """
    mine, theirs = one.samples
    if mine == theirs or one.same_loss:
        return None
    if _draws_by_rank(one.evidence):
        return StateOnly.DRAWN_BY_RANK
    others = f"{(theirs - mine).total()} of {theirs.total()} samples of the next step differ"
    return rule.failed(f"{one.where}: {others}{one.saved}", one.position_line, required=one.asked)


def _uneven(rule: Rule, one: Resumed) -> StateOnly | None:
    """A mean of the ranks' means is another number where they share a batch unevenly, as 3 ranks
    do one of 8: a size for which the script was not written (exam round 7).
    """
    even = _evenly(one.run) and (_targets_evenly(one.run) or not _targets_evenly(one.base))
    return None if even else StateOnly.UNEVEN


# In the order in which they are asked; each may take for granted that those before it found
# nothing.
CASES: tuple[Callable[[Rule, Resumed], Finding | StateOnly | None], ...] = (
    _stopped,
    _begun_elsewhere,
    _other_state,
    _saved_in_a_step,
    _other_batch,
    _other_samples,
    _uneven,
)


def _over_one_process(evidence: Evidence) -> set[str] | None:
    """The measures in which the script differs from one process that starts from scratch; None
    where that cannot be compared.
    """
    run, single = evidence.full_precision, evidence.single
    if (
        run is None
        or single is None
        or incomparable(run, single, "single", "one process") is not None
    ):
        return None
    return set(limits(evidence, ReshardKeepsTrajectory.name).over(compare(run, single).measures))


def _draws_by_rank(evidence: Evidence) -> bool:
    """Whether one process that starts from scratch trains on other samples, such as noise of its
    own.
    """
    single = evidence.single
    return (
        single is not None
        and single.steps() > 0
        and single.global_batch(1) != evidence.trained.global_batch(1)
    )


def _displaced(one: Resumed) -> str:
    """Whether a resume with batches of another size repeats or leaves out samples of an epoch; ""
    if that is not known.
    """
    before, following = Counter[int](), Counter[int]()
    for step in range(1, one.after + 1):
        before += one.evidence.trained.global_batch(step)
    for step in range(one.offset + 1, one.base.steps() + 1):
        following += one.base.global_batch(step)
    mine, due = one.samples
    if len(mine) < RESHARD_SAMPLES or max((before + following).values(), default=0) > 1:
        return ""  # samples come again without a resume too
    if mine.keys() <= before.keys():
        return (
            f"its first {mine.total()} samples were trained on before the checkpoint, and others"
            " were not yet"
        )
    late = mine.keys() <= following.keys() and mine.keys().isdisjoint(due)
    return f"the next {due.total()} samples of the uninterrupted run are left out" if late else ""


def _evenly(run: Run) -> bool:
    """Whether the ranks of a run share its samples evenly; its size may be one that the script was
    not written for.
    """
    sizes = {run.rows(1)[rank].total() for rank in run.data_ranks if rank < len(run.rows(1))}
    return len(sizes) <= 1


def _targets_evenly(run: Run) -> bool:
    """Whether the mean losses of the ranks are over equally many targets each, in the first
    step.
    """
    micros = [[m for m in trace.of(Micro) if m.step == 1] for trace in run.traces]
    return (
        len(
            {
                tuple(c.valid for m in own for c in m.criteria if c.reduction == "mean")
                for own in micros
            }
        )
        <= 1
    )


def _state_differs(base: Run, run: Run, step: int) -> str | None:
    """Which weights or optimizer state differ between `step` of `base` and the first step of
    `run`.
    """
    for field, owner in (("weights", "model"), ("state", "optimizer")):
        theirs, mine = base.whole_state(field, step), run.whole_state(field, 1)
        if field == "weights":
            theirs = _restored(base, theirs, mine)
        # Parts of a table that the script divides have other shapes on other ranks (exam round 6,
        # w_14_rowparallel_table): neither they nor sums beside them are known as a whole.
        parts = cut_otherwise(base, run)
        theirs = {
            n: a for n, a in theirs.items() if n not in parts and n.rpartition(".")[0] not in parts
        }
        wrong = [n for n, a in theirs.items() if n not in mine or not _same(a, mine[n])]
        if wrong:
            return (
                f"{len(wrong)} of {len(theirs)} tensors of the {owner} ({some(wrong)}) are not what"
                " was saved"
            )
    return None


def _restored(base: Run, theirs: dict[str, Sketch], mine: dict[str, Sketch]) -> dict[str, Sketch]:
    """The weights that a checkpoint must hold.

    A model that the resumed run has not called yet is not known; what no optimizer holds and the
    script changes is made again by the script (exam round 3).
    """
    held = {name for record in base.traces[0].steps for name in record.held}
    before = base.whole_state("weights", 1)
    return {n: a for n, a in theirs.items() if n in mine and (n in held or before.get(n) == a)}


def _same(a: Sketch, b: Sketch) -> bool:
    """Whether two sketches differ by no more than the order in which shards are summed."""
    return difference(a, b) <= 1e-6 * math.sqrt(a[0]) + 1e-12

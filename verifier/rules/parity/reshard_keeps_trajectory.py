import math
from collections import Counter

from ...analysis.applicability import begins_elsewhere
from ...analysis.comparison import (
    CLEARLY,
    compare,
    incomparable,
    limits,
    loss_apart,
    norm_apart,
    undecided,
)
from ...analysis.ending import SAME_END, resharded_to_the_same_end
from ...analysis.root_cause import root_cause
from ...analysis.unusual_parallelism import cut_otherwise, saved_in_a_step
from ...trace import Run, difference
from ...trace.events import Micro
from ..base import Evidence, Finding, Rule, some
from ..checkpoint._resumed import RAISED, load_line, saved_at

# times its limit, what rounding was seen to grow to in right scripts that train as one process does
GROWN = 100
LEAST = 4  # samples of a step, from which on it is not by chance that all of them come again


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
        saved = saved_at(evidence)
        offset = after if base is evidence.train else 0
        found = limits(evidence, self.name)
        what, measure = (
            ("losses", "loss") if _same_loss(evidence) else ("gradient norms", "gradient norm")
        )
        between, allowed = loss_apart if measure == "loss" else norm_apart, found.allowed[measure]
        worst, limit, sizes, other_batches, by_rank = 0.0, allowed, [], [], ""
        for run in evidence.reshards:
            where = f"{base.world_size} -> {run.world_size} ranks"
            sizes.append(where)
            if not run.completed:
                cause, asked, late = root_cause(run), evidence.course.sizes_chosen, run.steps() > 1
                text = f"{where}: the run failed: {cause.text}"
                by = {"required": asked or late, "suspicion": late and not asked}
                return self.failed(text, cause.location, fix=RAISED, **by)
            if reason := begins_elsewhere(base, run, offset):
                return self.unknown(f"{where}: {reason}")
            line = load_line(evidence, run)
            if (wrong := _state_differs(base, run, offset + 1)) is not None:
                ignored = after > 0 and _state_differs(evidence.trained, run, 1) is None
                begins = "the checkpoint is ignored, and training begins at the initial weights"
                asked = evidence.course.sizes_chosen or not ignored
                return self.failed(
                    f"{where}: {begins if ignored else wrong}{saved}", line, required=asked
                )
            if saved_in_a_step(evidence):
                continue  # of which the resumed run makes the rest: only the state is compared
            mine, theirs = run.global_batch(1), base.global_batch(offset + 1)
            same_loss = between(run, base, 1, offset) <= allowed
            if mine.total() != theirs.total() and not same_loss:
                if wrong := _displaced(evidence.trained, base, run, after, offset):
                    asked = evidence.course.sizes_chosen
                    return self.failed(f"{where}: {wrong}{saved}", line, required=asked)
                depends = (
                    "the state is as saved, but the global batch depends on the number of ranks"
                )
                other_batches.append(f"{where}: {depends}")
                continue
            if mine != theirs and not same_loss:
                if _draws_by_rank(evidence):
                    by_rank = "; the samples depend on the number of ranks without a resume, too"
                    continue
                others = (
                    f"{(theirs - mine).total()} of {theirs.total()} samples of the next step differ"
                )
                return self.failed(
                    f"{where}: {others}{saved}", line, required=evidence.course.sizes_chosen
                )
            if not _evenly(run) or (_targets_evenly(base) and not _targets_evenly(run)):
                # a mean of the ranks' means is another number there: only the state is compared
                continue
            last = min(run.steps(), base.steps() - offset) if mine.total() == theirs.total() else 1
            for k in range(
                1, last + 1
            ):  # where samples are cut into other rows, later batches may be other ones
                if run.objective(k) is not None and base.objective(offset + k) is not None:
                    apart, most = (
                        between(run, base, k, offset),
                        allowed if k == 1 else CLEARLY * allowed,
                    )
                    apart = math.inf if math.isnan(apart) else apart
                    worst, limit = max(
                        (worst, limit), (apart, most), key=lambda pair: pair[0] / pair[1]
                    )
        if other_batches and (evidence.course.sizes_chosen or len(other_batches) == len(sizes)):
            return self.unknown(other_batches[0])
        ranks = "; ".join(sizes)
        if worst <= limit:
            text = f"{ranks}: same state, same samples, {what} within {worst:.1e}"
            text = f"{ranks}: same state{by_rank}" if by_rank else text
            return self.passed(text, measured=worst, limit=limit)
        if not found.differ({measure: worst}):
            return self.unknown(f"{ranks}: {undecided(measure, worst, found)}")
        text = (
            f"{what} after resharding differ by {worst:.2g} ({ranks}; allowed {limit:.1g}){saved}"
        )
        grown = worst <= GROWN * limit and _over_one_process(evidence) == set()
        line = load_line(evidence, evidence.reshards[0])
        return self.failed(text, line, measured=worst, limit=limit, suspicion=grown)


def _same_loss(evidence: Evidence) -> bool:
    """Whether losses mean the same on other numbers of ranks.

    A script that scales its gradients itself may sum them.
    """
    return _over_one_process(evidence) != {"loss"}


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


def _displaced(train: Run, base: Run, run: Run, after: int, offset: int) -> str:
    """Whether a resume with batches of another size repeats or leaves out samples of an epoch; ""
    if that is not known.
    """
    before = sum((train.global_batch(step) for step in range(1, after + 1)), Counter[int]())
    following = sum(
        (base.global_batch(step) for step in range(offset + 1, base.steps() + 1)), Counter[int]()
    )
    mine, due = run.global_batch(1), base.global_batch(offset + 1)
    if len(mine) < LEAST or max((before + following).values(), default=0) > 1:
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
        if field == "weights":  # a model that the resumed run has not called yet is not known
            held = {name for record in base.traces[0].steps for name in record.held}
            before = base.whole_state(field, 1)
            # what no optimizer holds and the script changes is made again by the script
            theirs = {
                n: a for n, a in theirs.items() if n in mine and (n in held or before.get(n) == a)
            }
        parts = cut_otherwise(base, run)  # whole, they are not known
        theirs = {
            n: a for n, a in theirs.items() if n not in parts and n.rpartition(".")[0] not in parts
        }
        near = {
            n
            for n, a in theirs.items()
            if n in mine and difference(a, mine[n]) <= 1e-6 * math.sqrt(a[0]) + 1e-12
        }
        wrong = [name for name in theirs if name not in near]
        if wrong:
            return (
                f"{len(wrong)} of {len(theirs)} tensors of the {owner} ({some(wrong)}) are not what"
                " was saved"
            )
    return None

import math
from functools import partial

from ...analysis.agreement import Agree, among, noise
from ...analysis.comparison import parted
from ...analysis.state import apart, evolving, of_one_branch, states
from ...tolerances import LEAST_ELEMENTS, STATISTICS
from ...trace.events import Held, State
from ..base import Evidence, Finding, Run, count, some
from ._one_process import OneProcessRule


class StateSameInOneProcess(OneProcessRule):
    """What evolves beside the weights, such as an average of them, is what one process has.

    Why: an EMA, a running statistic or a routing bias feeds no loss of the next steps, so that
    losses and gradients agree with any oracle whatever becomes of it. Updated on rank 0 only, or
    from one rank's samples, it is wrong in what is evaluated and exported.
    Wrong:
        if dist.get_rank() == 0:  # the other ranks' shards of the average stay as they are
            for name, param in model.named_parameters():
                average[name].lerp_(param.detach(), 0.1)
    Right:
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
    Fix: Update it on all ranks: each rank its own shards, and statistics of samples from an
    all-reduced sum.
    Source: laws L5 and L7: the probe records the tensors that the training loop holds and that
    change from step to step; those of all ranks together are compared with those of one process
    that has the same weights.
    """

    def applies(self, evidence: Evidence) -> str:
        seen = _tensors(evidence, evidence.trained) or _statistics(evidence)
        return (
            "" if seen else "no tensor beside weights and optimizer state changes from step to step"
        )

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        statistics = _statistics(evidence) if found.status == "inconclusive" else {}
        if not statistics:
            return found
        worst = max(statistics, key=lambda path: statistics[path])
        apart = (
            f"all ranks hold the same {some(sorted(statistics))}, and one process another one,"
            f" {statistics[worst]:.2g} apart"
        )
        fix = (
            "Compute statistics of the data from sums over all ranks (count, sum, sum of squares),"
            " not as means of the ranks' own."
        )
        what = (
            f"before step 1 {apart} relative (allowed: {STATISTICS:.0e}); the samples that the"
            " model is given differ as well"
        )
        return self.failed(what, measured=statistics[worst], limit=STATISTICS, fix=fix)

    def compare(self, evidence: Evidence, run: Run, single: Run) -> Finding:
        paths = _tensors(evidence, run)
        known = noise(evidence, evidence.times(self.name))
        wrong: dict[str, float] = {}
        compared: set[str] = set()
        for sides in Agree(partial(among, paths), ("single",)).sides(evidence):
            for path in (one for one in sides.both() if one not in wrong):
                theirs, mine = sides.one[path], sides.other[path]
                if theirs.sketch is None or theirs.numel != mine.numel:
                    continue
                compared.add(path)
                value = apart(mine, theirs)
                # A queue takes the samples of the ranks in another order than one process (exam
                # round 4, l_03_moco_queue).
                if not value <= known.limit(path) and not _reordered(mine, theirs):
                    wrong[path] = value
        tensors = count(len(compared), "tensor")
        if wrong:
            line = next(
                (r.at_line for r in run.places(State) if wrong.keys() & r.values.keys()), None
            )
            worst = max(wrong, key=lambda path: wrong[path] / known.limit(path))
            value, limit = wrong[worst], known.limit(worst)
            how = f"by up to {value:.2g} (allowed: {limit:.1g}; {len(wrong)} of {tensors})"
            text = (
                f"{some(sorted(wrong))} differ from those of one process with the same weights,"
                f" {how}"
            )
            return self.failed(text, line, measured=value, limit=limit)
        if not compared:
            return self.not_applicable(
                "what changes beside weights is other data on each number of ranks"
            )
        return self.passed(
            f"{tensors} beside weights and optimizer state agree with those of one process"
        )


def _statistics(evidence: Evidence) -> dict[str, float]:
    """{path: relative difference} of constant tensors of objects, equal on all ranks, that one
    process has other values of.

    Only where that process is given other samples from the first step on. A multiple by the number
    of ranks is intended.
    """
    run, single = evidence.trained, evidence.single
    # A wrong statistic changes the samples themselves from step 1 on, so that nothing else can be
    # compared; only then are constants of objects looked at (exam round 6 w_03_pooled_scaler:
    # inconclusive before).
    if single is None or not single.completed or parted(run, single) != 1 or run.world_size == 1:
        return {}
    ranks = [states(trace).get(1, {}) for trace in (*run.traces, *single.traces)]
    found, changing = {}, evolving(run)
    for path, held in ranks[0].items():
        if held.holder != "object" or held.sharded or path in changing:
            continue
        if held.sketch is None or not held.dtype.startswith("float"):
            continue
        same = [values[path] for values in ranks if path in values]
        there = [one for one in same if one.numel == held.numel]
        if len(there) < len(ranks) or any(apart(held, one) != 0.0 for one in there[:-1]):
            continue
        value = apart(held, there[-1])
        if value > STATISTICS and not _scaled_by_ranks(held, there[-1], run.world_size):
            found[path] = value
    return found


def _scaled_by_ranks(mine: Held, theirs: Held, ranks: int) -> bool:
    """Whether the ratio of two tensors is the number of ranks, or its root.

    A global batch size or its root differs from one process by exactly that: intended, as in
    learning rates that are scaled by it.
    """
    a, b = mine.sketch, theirs.sketch
    ratio = math.sqrt(a[0] / b[0]) if a is not None and b is not None and b[0] > 0.0 else 1.0
    # Equal norms, too, are no other statistic.
    return any(
        math.isclose(max(ratio, 1 / ratio), ranks**power, rel_tol=1e-5) for power in (0, 0.5, 1)
    )


def _reordered(mine: Held, theirs: Held) -> bool:
    """Whether two tensors have one norm, as those of a queue that takes the samples of the ranks in
    another order.
    """
    a, b = mine.sketch, theirs.sketch
    # The same rows in another order have the same norm up to the order of summation (1e-6); a
    # tensor of zeros has no order to show (exam round 4 l_03_moco_queue).
    return a is not None and b is not None and a[0] > 0.0 and math.isclose(a[0], b[0], rel_tol=1e-6)


def _tensors(evidence: Evidence, run: Run) -> set[str]:
    """The paths of tensors, of modules and of objects and variables of the loop, that evolve, and
    are sharded or equal on all ranks.
    """
    first, *others = [states(trace) for trace in run.traces]
    last = max(first, default=0)
    found, passing = set(), of_one_branch(evidence.sources)
    for path in evolving(run) & first.get(last, {}).keys():
        held = first[last][path]
        there = [other.get(last, {}).get(path) for other in others]
        # What differs between ranks is data of each rank: only sharded or equal tensors can be
        # those of one process (test_laws.py averaging(1.5, 2.0)).
        # What rank 0 alone holds, such as its shards of the last step for a log, is no whole tensor
        # (penr-oz-neural-network: a list of DTensors).
        equal = None not in there and (
            held.sharded or all(one is not None and apart(held, one) == 0.0 for one in there)
        )
        kept = held.holder in ("module", "parameter") or (
            # Small tensors of the loop are sums for a log of the rank's own samples; from 16
            # elements on they are more than a few sums.
            held.holder in ("object", "local") and held.numel >= LEAST_ELEMENTS
        )
        if (
            held.sketch is not None
            and not held.live
            and kept
            and equal
            # What is assigned and read in one branch alone (a sum for the log) is not carried from
            # step to step (exam round 7 (a sum for the log in a branch): fa_05_moe_balance_bias
            # twin).
            and tuple(path.rsplit(".", 1)) not in passing
        ):
            found.add(path)
    return found

from ...analysis.comparison import FLOOR, MULTIPLE, compare, incomparable, limits, parted
from ...analysis.state import LEAST, apart, evolving, noise, states, whole
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, Run, count, some


class StateSameInOneProcess(Rule):
    """What evolves beside the weights, such as an average of them, is what one process has.

    Why: an EMA, a running statistic or a routing bias feeds no loss of the next steps, so that losses and gradients agree
    with any oracle whatever becomes of it. Updated on rank 0 only, or from one rank's samples, it is wrong in what is
    evaluated and exported.
    Wrong:
        if dist.get_rank() == 0:  # the other ranks' shards of the average stay as they are
            for name, param in model.named_parameters():
                average[name].lerp_(param.detach(), 0.1)
    Right:
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
    Fix: Update it on all ranks: each rank its own shards, and statistics of samples from an all-reduced sum.
    Source: laws L5 and L7: the probe records the tensors that the training loop holds and that change from step to step;
    those of all ranks together are compared with those of one process that has the same weights.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        return "" if _tensors(run) else "no tensor beside weights and optimizer state changes from step to step"

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
        known, paths = noise(evidence), _tensors(run)
        wrong: dict[str, tuple[float, float]] = {}
        compared: set[str] = set()
        for step in range(1, (parted(run, single) or min(run.steps(), single.steps()) + 1)):
            mine, theirs = whole(run, step), whole(single, step)
            for path in paths & mine.keys() & theirs.keys():
                if theirs[path].sketch is None or theirs[path].numel != mine[path].numel or path in wrong:
                    continue
                compared.add(path)
                limit = evidence.times(self.name) * (MULTIPLE * known.get(path, 0.0) + FLOOR)
                if not apart(mine[path], theirs[path]) <= limit:
                    wrong[path] = (apart(mine[path], theirs[path]), limit)
        if wrong:
            first = next((r for r in run.traces[0].of(State) if wrong.keys() & r.values.keys()), None)
            value, limit = max(wrong.values(), key=lambda pair: pair[0] / pair[1])
            return self.failed(
                f"{some(sorted(wrong))} differ from those of one process with the same weights, by up to {value:.2g} "
                f"(allowed: {limit:.1g}; {len(wrong)} of {count(len(compared), 'tensor')})",
                first.at_line if first else None,
                measured=value,
                limit=limit,
            )
        if not compared:
            return self.not_applicable("what changes beside weights is other data on each number of ranks")
        return self.passed(
            f"{count(len(compared), 'tensor')} beside weights and optimizer state agree with those of one process"
        )


def _tensors(run: Run) -> set[str]:
    """The paths of tensors, of modules and of objects and variables of the loop, that evolve, and are sharded or equal on all ranks."""
    first, *others = [states(trace) for trace in run.traces]
    last = first[max(first)] if first else {}
    paths = {
        p
        for p in evolving(run) & last.keys()
        if last[p].sketch is not None
        and (
            last[p].holder in ("module", "parameter")
            or (last[p].holder in ("object", "local") and last[p].numel >= LEAST)
        )
    }
    return {
        p
        for p in paths
        if not last[p].live and (last[p].sharded or all(_equal(last[p], other, max(first), p) for other in others))
    }


def _equal(mine: Held, other: dict[int, dict[str, Held]], step: int, path: str) -> bool:
    theirs = other.get(step, {}).get(path)
    return theirs is not None and apart(mine, theirs) == 0.0

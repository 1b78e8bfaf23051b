import math

from ...analysis.factors import weight
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Micro
from ..base import Rule
from ._weight import NO_TWIN, SAME


class TokenMeanOfMeans(Rule):
    """The loss of a step is the mean over all its targets, not a mean of means.

    Why: with ignored targets (`ignore_index`, padding) micro-batches and ranks hold different numbers of targets. If
    each divides by its own, a target in a short micro-batch weighs more than one in a long one. DDP does exactly the
    same, so parity with DDP shows nothing.
    Wrong:
        loss = F.cross_entropy(logits, targets, ignore_index=-100) / accumulation_steps
        loss.backward()
    Right:
        total = (targets != -100).sum()  # over all micro-batches of the step
        dist.all_reduce(total)
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") * dist.get_world_size() / total
        loss.backward()
    Fix: Sum the loss, divide by the number of targets of the whole step over all ranks (one all-reduce), multiply by
    the world size.
    Source: pytorch/torchtitan PR#1803; meta-pytorch/torchtune PR#2172.
    """

    needs = frozenset({"train", "full_precision", "single"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.full_precision
        if run is None or run.steps() == 0:
            return ""
        steps = _weights(run)
        if not steps and evidence.single is not None and evidence.single.global_batch(1) == run.global_batch(1):
            return "no cross entropy was seen; the comparison with one process on the whole batch decides"
        if not steps or _counts_differ(steps):
            return ""
        return (
            f"all micro-batches of a step have as many targets as one another, in each of {count(len(steps), 'step')}"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.full_precision
        if run is None or run.steps() == 0:
            return self.unknown(evidence.missing.get("full_precision", NO_TWIN))
        steps = _weights(run)
        if not steps:
            return self.unknown("no cross entropy was seen and no single process ran the same batch")
        for step, weights in steps.items():
            counts = [valid for _, valid in weights]
            per_target = [weight / valid for weight, valid in weights]
            if max(counts) == min(counts) or _spread(per_target) <= SAME:
                continue
            worst = _spread(per_target)
            return self.failed(
                f"at step {step} micro-batches of {min(counts)} to {max(counts)} targets are weighed so that a target counts up to "
                f"{1.0 + worst:.3g} times as much in one as in another",
                evidence.line_of(run, Micro),
                measured=worst,
                limit=SAME,
            )
        return self.passed(f"every target weighs the same in each of {count(len(steps), 'step')}")


def _weights(run: Run) -> dict[int, list[tuple[float, int]]]:
    """{step: `weight` of each micro-batch on each rank} where all of a step are known."""
    found = {}
    for step in range(1, run.steps() + 1):
        micros = [weight(m) for own in run.micros(step) for m in own]
        weights = [w for w in micros if w is not None]
        if weights and len(weights) == len(micros):
            found[step] = weights
    return found


def _counts_differ(steps: dict[int, list[tuple[float, int]]]) -> bool:
    """Whether micro-batches of one step have different numbers of targets, so that a mean of means would show."""
    return any(len({valid for _, valid in weights}) > 1 for weights in steps.values())


def _spread(values: list[float]) -> float:
    return max(values) / min(values) - 1.0 if min(values) > 0 else math.inf

"""The rule `token-mean-of-means`."""

from __future__ import annotations

import math

from ...analysis.factors import weight
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Micro
from ..base import Rule
from ._weight import SAME


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
    Mend: Sum the loss, divide by the number of targets of the whole step over all ranks (one all-reduce), multiply by
    the world size.
    Source: pytorch/torchtitan PR#1803; meta-pytorch/torchtune PR#2172.
    Torch: run on 2.13.0.
    """

    needs = frozenset({"train", "full_precision", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.full_precision
        if run is None or run.steps() == 0:
            return self.unknown(evidence.missing.get("full_precision", "no optimizer step was seen"))
        seen = 0
        for step in range(1, run.steps() + 1):
            weights = [w for micros in run.micros(step) for m in micros if (w := weight(m)) is not None]
            if len(weights) != sum(len(micros) for micros in run.micros(step)) or not weights:
                continue
            seen += 1
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
        if seen:
            return self.passed(f"every target weighs the same in each of {count(seen, 'step')}")
        if evidence.single is not None and evidence.single.global_batch(1) == run.global_batch(1):
            return self.passed("no cross entropy was seen; the comparison with one process on the whole batch decides")
        return self.unknown("no cross entropy was seen and no single process ran the same batch")


def _spread(values: list[float]) -> float:
    return max(values) / min(values) - 1.0 if min(values) > 0 else math.inf

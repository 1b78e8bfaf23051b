import math

from ...analysis.gradient_scale_causes import weight
from ...analysis.limits import agrees
from ...tolerances import NEAR, UNEVEN_TARGETS
from ...trace.events import Micro
from ..base import Evidence, Finding, Run, count
from ..policies import ShownBy
from ._base import ScaleRule


def same_in_one_process(evidence: Evidence) -> bool:
    """Whether one process that accumulates does the same: each micro-batch counts alike, however
    many targets it has.
    """
    return any(
        max(counts) > UNEVEN_TARGETS * min(counts)
        and max(weights) - min(weights) <= NEAR * max(weights)
        for weights, counts in (
            zip(*one, strict=True) for one in _weights(evidence.single).values() if len(one) > 1
        )
    )


class TokenMeanOfMeans(ScaleRule):
    """The loss of a step is the mean over all its targets, not a mean of per-micro-batch means.

    Why: with ignored targets (`ignore_index`, padding) micro-batches and ranks hold different
    numbers of targets. If each divides by its own, a target in a short one weighs more. DDP does
    the same, so comparing with DDP hides it.
    Wrong:
        loss = F.cross_entropy(logits, targets, ignore_index=-100) / accumulation_steps
        loss.backward()
    Right:
        total = (targets != -100).sum()  # over all micro-batches of the step
        dist.all_reduce(total)
        summed = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        loss = summed * dist.get_world_size() / total
        loss.backward()
    Fix: Sum the loss, divide by the targets of the step over all ranks (one all-reduce), multiply
    by the world size.
    Source: pytorch/torchtitan PR#1803; meta-pytorch/torchtune PR#2172.
    """

    policies = (ShownBy("matches-single-process", unless=same_in_one_process),)
    in_windows = True
    needs = frozenset({"train", "full_precision", "single"})

    def applies(self, evidence: Evidence) -> str:
        run, single, steps = (
            evidence.full_precision,
            evidence.single,
            _weights(evidence.full_precision),
        )
        if steps:
            # With equally many targets everywhere the mean of means is the mean (zoo/minimal.py).
            equal = all(len({valid for _, valid in weights}) == 1 for weights in steps.values())
            return "all micro-batches of a step have the same number of targets" if equal else ""
        # Without any cross entropy the rule has nothing to weigh: not applicable, instead of
        # inconclusive, if one process covers the loss (exam round 6: inconclusive t_05, w_03, w_15,
        # w_21).
        seen = run is None or any(micro.criteria for micro in run.all(Micro))
        compared = (
            run is not None and single is not None and single.global_batch(1) == run.global_batch(1)
        )
        if run is not None and single is not None and not compared:
            # Rows that are cut otherwise hash otherwise: equal numbers show the same batch
            # (documents packed for each rank).
            compared = agrees(evidence, self.name, run, single, "single", "one process")
        return (
            ""
            if seen and not compared
            else "no cross entropy was seen; matches-single-process covers other losses"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run, steps = evidence.full_precision, _weights(evidence.full_precision)
        if run is None or not steps:
            what = "no cross entropy was seen and no single process ran the same batch"
            return self.unknown(
                f"{what}: give --single-args with which one process takes the samples of all ranks"
            )
        for step, weights in steps.items():
            counts = [valid for _, valid in weights]
            per_target = [weight / valid for weight, valid in weights]
            worst = max(per_target) / min(per_target) - 1.0 if min(per_target) > 0 else math.inf
            # Weights of targets that differ by more than 0.1 % are no rounding; whether it matters
            # is shown by one process (shown_by) (exam round 6 v_03_distill_tokens twin: 1.01 times,
            # a warning since).
            if max(counts) > min(counts) and worst > NEAR:
                text = (
                    f"at step {step} some targets weigh {1.0 + worst:.3g} times as much as others"
                    " (expected: 1)"
                )
                text += f": micro-batches of {min(counts)} to {max(counts)} targets"
                return self.failed(text, run.line_of(Micro), measured=worst, limit=NEAR)
        return self.passed(
            f"every target has the same weight in each of {count(len(steps), 'step')}"
        )


def _weights(run: Run | None) -> dict[int, list[tuple[float, int]]]:
    """{step: `weight` of each micro-batch on each rank whose gradients the step consumes} where all
    of a step are known.
    """
    if run is None:
        return {}
    found = {
        step: [weight(m) for own in run.consumed(step) for m in own]
        for step in range(1, run.steps() + 1)
    }
    known = {step: [w for w in weights if w is not None] for step, weights in found.items()}
    return {
        step: weights
        for step, weights in known.items()
        # A step counts only if the weight of every micro-batch on every rank is known.
        if weights and len(weights) == len(found[step])
    }

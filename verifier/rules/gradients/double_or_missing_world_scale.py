import math
from collections.abc import Iterator

from ...analysis.gradient_scale_causes import Reading, near, readings, total_weight, words
from ...source.lines import find_scale
from ...tolerances import NEAR
from ...trace import Run, difference
from ...trace.events import Divide, Micro, Step
from ..base import Evidence, Finding
from ._base import ScaleRule


class DoubleOrMissingWorldScale(ScaleRule):
    """The gradient is divided once by the world size and once by the number of micro-batches.

    Why: FSDP averages over ranks. Dividing the loss by the world size averages twice; not dividing
    it by the number of micro-batches gives their sum; `set_gradient_divide_factor` does not
    recurse. With AdamW, and with an active clip, the loss curve hides a constant factor; weight
    decay, SGD and the clip threshold do not.
    Wrong:
        loss = loss_of(model, batch) / dist.get_world_size()  # FSDP averages over ranks already
    Right:
        loss = loss_of(model, batch) / accumulation_steps
    Fix: Divide the mean loss of the micro-batch by the number of micro-batches of the step; FSDP
    averages over ranks.
    Source: pytorch/torchtitan#2318; meta-pytorch/torchtune PR#2172; the docstring of
    `set_gradient_divide_factor`.
    """

    in_windows = True
    needs = frozenset({"train", "full_precision", "reference", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run, seen = evidence.full_precision, []
        assert run is not None
        for oracle, label in ((evidence.single, "one process"), (evidence.reference, "DDP")):
            if (
                oracle is None
                or oracle.steps() == 0
                # Another batch in one process gives other gradients: no factor can be read from
                # them (zoo/per_rank_batch.py).
                or oracle.global_batch(1) != run.global_batch(1)
            ):
                continue
            for field, name, ratio in _ratios(run, oracle):
                if found := readings(ratio, run, oracle):
                    text = (
                        f"the gradient of {name} is {ratio:.4g} times that of {label} on the same"
                        " batch"
                    )
                    return self._scaled(evidence, run, field, ratio, found, text)
            seen.append(label)
        # One process on the same batch decides; the sum of the losses' weights is asked only where
        # it saw other samples.
        total = total_weight(run) if "one process" not in seen else None
        if total is not None:
            if found := readings(total, run):
                text = f"the losses of step 1 add up to {total:.4g} times its mean cross entropy"
                return self._scaled(evidence, run, "grads", total, found, text)
            seen.append("the mean cross entropy")
        if not seen:
            return self.unknown("no oracle saw the same batch, and no cross entropy was computed")
        return self.passed(f"no factor between the gradients and those of {' and '.join(seen)}")

    def _scaled(
        self,
        evidence: Evidence,
        run: Run,
        field: str,
        ratio: float,
        found: list[Reading],
        text: str,
    ) -> Finding:
        """The finding at the line that scales the gradients, as far as the records show it."""
        line, where = run.line_of(Micro), "the factor is in the loss or is applied in its backward"
        changed = evidence.scaled.scaled_line() if evidence.scaled is not None else None
        before_clip = _scaled_before_clip(run) if field == "grads" else 1.0
        if field == "grads_at_step":
            line, where = (
                changed or run.line_of(Step),
                "the gradients are scaled between backward and this line",
            )
            where = "the gradients are scaled in this function" if changed else where
        elif changed is not None and not near(before_clip, 1.0):
            line, where = (
                changed,
                f"this function scales the gradients by {before_clip:.4g} after backward",
            )
        elif line is not None and (scale := find_scale(evidence.sources, line)) is not None:
            line, where = scale, "the loss is scaled here"
        for record in run.places(Divide) if all(r.cause == "ranks" for r in found) else ():
            factor = len(run.data_ranks) / float(record.factor)
            if near(ratio, factor):
                line, where = record.at_line, "`set_gradient_divide_factor` is called here"
            elif near(ratio, 1.0 / factor):
                line, where = (
                    record.at_line,
                    "this `set_gradient_divide_factor` does not reach this parameter's group",
                )
        return self.failed(
            f"{text} (expected: 1): {words(found)}; {where}", line, measured=ratio, limit=1.0
        )


def _scaled_before_clip(run: Run) -> float:
    """The factor by which the script changes the norm of the gradients between the first backward
    and a clip; 1.0 without one.
    """
    before, after = run.grad_norm(1, "after_backward"), run.grad_norm(1)
    return after / before if before and after else 1.0


def _ratios(run: Run, oracle: Run) -> Iterator[tuple[str, str, float]]:
    """(field, parameter, factor) where the first gradient is a multiple of the oracle's, after
    backward or at the step.

    Without those after backward that the script itself scales, beside others that need it not
    (experts of one rank).
    """
    after, at_step = (dict(_multiples(run, oracle, field)) for field in ("grads", "grads_at_step"))
    right = {name for name, ratio in at_step.items() if near(ratio, 1.0)}
    # Experts of one rank have the sum of the ranks' gradients until the script divides it, beside
    # others that need it not: what counts is what the optimizer finds (experts of one rank (exam
    # round 12 nd_11_expert_exchange)).
    if any(near(after.get(name, 0.0), 1.0) for name in right):
        after = {name: ratio for name, ratio in after.items() if name not in right}
    for field, found in (("grads", after), ("grads_at_step", at_step)):
        for name, ratio in found.items():
            yield field, name, ratio


def _multiples(run: Run, oracle: Run, field: str) -> Iterator[tuple[str, float]]:
    """(parameter, factor) of gradients that are multiples of the oracle's."""
    mine, theirs = run.whole(Step, field, 1), oracle.whole(Step, field, 1)
    for name, a in mine.items():
        # Gradients below 1e-5 of the largest (a bias before a softmax) are rounding of a sum that
        # cancels: any factor between two of them is chance (exam round 11 mc_01 twin shows it).
        by_chance = name in run.faint or name in oracle.faint
        if a and (b := theirs.get(name)) and a[0] > 0.0 and b[0] > 0.0 and not by_chance:
            ratio = math.sqrt(a[0] / b[0])
            # The whole gradient must be a multiple up to 1e-3: far above rounding, far below the
            # smallest factor of two.
            if difference(a, [ratio * x for x in b]) <= NEAR * math.sqrt(a[0]):
                yield name, ratio

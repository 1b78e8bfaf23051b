import math

from ...analysis.comparison import compare, incomparable
from ...analysis.gradient_scale_causes import near, readings, total_weight, words
from ...analysis.short_accumulation import short_accumulation
from ...tolerances import GROSS, NEAR
from ...trace.events import Micro, Step
from ..base import Evidence, Finding, Rule, Run, count

_EARLY = (
    "Make the update after the last micro-batch of each group, `(index + 1) % n == 0`, not after"
    " the first."
)


class GradientOfMeanLoss(Rule):
    """The gradient of a step is that of the mean loss over its samples, not of a multiple.

    Why: a sum over micro-batches that is never divided, or a division that is made twice,
    multiplies every gradient by a constant. DDP and one process make the same mistake, so that no
    comparison shows it; the clip threshold, SGD and weight decay feel it.
    Wrong:
        for micro in micros:
            loss_of(model, micro).backward()  # the sum of len(micros) means
        optimizer.step()
    Right:
        for micro in micros:
            (loss_of(model, micro) / len(micros)).backward()
        optimizer.step()
    Fix: Divide each micro-batch's mean loss by the number of micro-batches of the step, or the
    gradients before they are clipped; FSDP averages over ranks.
    Source: law L2: the losses that go into backward, added up over ranks and micro-batches, are
    compared with the mean of the cross entropies of the same samples; in the survey run the
    constants by which they are divided, where an epoch ends with fewer micro-batches
    (NVIDIA-NeMo/Automodel@9f7ac34f).
    """

    in_windows = True
    needs = frozenset({"train", "full_precision"})
    reads = frozenset({"single", "survey"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.full_precision
        if short_accumulation(evidence) is not None:
            return ""
        # The law needs a loss that is a multiple of one cross entropy a micro-batch: with other
        # terms beside it, or heads on the same tokens, the factor is not known.
        unknown = run is not None and run.steps() > 0 and total_weight(run) is None
        return (
            "no loss of a step is a multiple of one cross entropy a micro-batch" if unknown else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        if (short := short_accumulation(evidence)) is not None:
            has, full = short.step.batches, short.full
            which = "the first step" if short.first else "the last step of an epoch"
            text = (
                f"{which} has {count(has, 'micro-batch')} and divides each loss"
                f" by {full}, as steps of {full} do: it has {has / full:.4g} times the gradient of"
                " its mean loss (expected: 1)"
            )
            more = {"fix": _EARLY} if short.first else {}
            return self.failed(text, short.step.at_line, measured=has / full, limit=1.0, **more)
        return self._first_step(evidence)

    def _first_step(self, evidence: Evidence) -> Finding:
        run = evidence.full_precision
        total = total_weight(run) if run is not None and run.steps() else None
        if run is None or total is None:
            return self.unknown(
                evidence.missing.get("full_precision", "no full-precision run was made")
            )
        # Gradients divided before a clip are right: with a clip the scaling between backward and
        # clip counts, else that between backward and step (exam round 6 t_09_clip_window: twin was
        # a false alarm).
        clips = any(record.after_backward for record in run.at_step(Step, 1))
        before = run.grad_norm(1, "after_backward" if clips else "grads")
        after = run.grad_norm(1, "grads" if clips else "grads_at_step")
        scaled = after / before if before and after else 1.0
        # A sum of losses is right if the script divides the gradients afterwards by the same factor
        # (zoo/sum_reduction.py).
        if near(total * scaled, 1.0):
            what = f"{total * scaled:.4g} times the mean cross entropy"
            where = "clip" if clips else "step"
            return self.passed(f"gradients are scaled by {scaled:.4g} before the {where}: {what}")
        found = readings(total, run)
        if not found and _of_a_scaler(scaled):
            total *= scaled
            found = readings(total, run)
        if (
            found
            # A contrastive loss of gathered samples has on each rank the gradient of its own rows
            # alone, so the ranks' losses add up rightly: one process has the same gradients (exam
            # round 4 n_04_two_tower twin).
            and all(reading.cause == "ranks" for reading in found)
            and _as_one_process(evidence, run)
        ):
            return self.passed(
                f"the losses of the ranks add up to {total:.4g} times their mean, as one process"
                " needs it"
            )
        if found:
            what = (
                f"the losses of step 1 add up to {total:.4g} times its mean cross entropy"
                " (expected: 1)"
            )
            what += (
                f"{', and nothing divides the gradients before the clip' if clips else ''}:"
                f" {words(found)}"
            )
            return self.failed(what, run.line_of(Micro), measured=total, limit=1.0)
        what = f"{total:.4g} times the mean cross entropy of a step"
        return self.passed(f"the losses that went into backward add up to {what}")


def _of_a_scaler(scaled: float) -> bool:
    """Whether gradients are divided by a power of two as large as that of a GradScaler: the losses
    were multiplied by it (andersonbcdefg/simpler-fsdp).
    """
    mantissa, exponent = math.frexp(scaled) if scaled > 0.0 else (0.0, 0)
    return exponent < -8 and min(abs(mantissa - 0.5), abs(mantissa - 1.0)) <= NEAR


def _as_one_process(evidence: Evidence, run: Run) -> bool:
    """Whether one process has the same gradients: a loss of gathered samples has a gradient of each
    rank's rows alone.
    """
    single = evidence.single
    if single is None or incomparable(run, single, "single", "one process") is not None:
        return False
    measures = compare(run, single, until=1).measures
    return all(
        # Only a factor (2 or more) is asked about here, not a small error: 5 % apart is the same
        # gradient for this question (exam round 4 n_04_two_tower twin).
        value <= GROSS
        for name, value in measures.items()
        if name in ("first gradient", "gradient at the step")
    )

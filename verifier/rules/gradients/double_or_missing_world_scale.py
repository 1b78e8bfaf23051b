import math
from collections.abc import Iterator

from ...analysis.factors import Reading, near, readings, total_weight, words
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run, difference
from ...trace.events import Divide, Micro, Place, Step
from ..base import Rule
from ._weight import NO_TWIN, SAME


class DoubleOrMissingWorldScale(Rule):
    """The gradient is not off by the world size or by the number of micro-batches.

    Why: FSDP averages over ranks. Dividing the loss by the world size averages twice; not dividing it by the number
    of micro-batches averages too little; `set_gradient_divide_factor` does not recurse. AdamW hides any constant
    factor in the loss curve, and so does an active clip; weight decay, SGD and the clip threshold do not.
    Wrong:
        loss = loss_of(model, batch) / dist.get_world_size()  # FSDP averages over ranks already
        loss.backward()
    Right:
        loss = loss_of(model, batch) / accumulation_steps
        loss.backward()
    Fix: Backward through the mean loss of the micro-batch divided by the number of micro-batches of the step; FSDP
    averages over ranks.
    Source: pytorch/torchtitan#2318; meta-pytorch/torchtune PR#2172; the docstring of `set_gradient_divide_factor`.
    """

    needs = frozenset({"train", "full_precision", "reference", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.full_precision
        if run is None or run.steps() == 0:
            return self.unknown(evidence.missing.get("full_precision", NO_TWIN))
        told: list[str] = []
        for oracle, label in ((evidence.single, "one process"), (evidence.reference, "DDP")):
            if oracle is None or oracle.steps() == 0 or oracle.global_batch(1) != run.global_batch(1):
                continue
            for field, name, ratio in _ratios(run, oracle):
                if found := readings(ratio, run, oracle):
                    line, where = _scaled_at(evidence, run, field, ratio, found)
                    return self.failed(
                        f"the gradient of {name} is {ratio:.4g} times that of {label} on the same batch, {words(found)}; {where}",
                        line,
                        measured=ratio,
                        limit=1.0,
                    )
            told.append(label)
        total = total_weight(run) if "one process" not in told else None
        if total is not None:
            if found := readings(total, run):
                line, where = _scaled_at(evidence, run, "grads", total, found)
                return self.failed(
                    f"the losses that went into backward add up to {total:.4g} times the mean cross entropy of the step, "
                    f"{words(found)}; {where}",
                    line,
                    measured=total,
                    limit=1.0,
                )
            told.append("the mean cross entropy")
        if not told:
            return self.unknown("no oracle saw the same batch, and no cross entropy was computed")
        return self.passed(f"no factor between the gradients and those of {' and '.join(told)}")


def _scaled_at(
    evidence: Evidence, run: Run, field: str, ratio: float, found: list[Reading]
) -> tuple[Place | None, str]:
    """(line, where that is) of what scales the gradients, as far as the records show it."""
    for record in reversed(list(run.places(Divide)) if all(r.cause == "ranks" for r in found) else []):
        factor = len(run.data_ranks) / float(record.factor)
        if near(ratio, factor):
            return record.at_line, "`set_gradient_divide_factor` is called here"
        if near(ratio, 1.0 / factor):
            return record.at_line, "`set_gradient_divide_factor`, called here, does not reach this parameter's group"
    if field == "grads_at_step":
        return evidence.line_of(run, Step), "the gradients are scaled between backward and this line"
    return evidence.line_of(run, Micro), "the scale is applied at this backward or before it"


def _ratios(run: Run, oracle: Run) -> Iterator[tuple[str, str, float]]:
    """(field, parameter, factor) wherever the first gradient is a multiple of the oracle's, at backward or at the step."""
    for field in ("grads", "grads_at_step"):
        mine, theirs = run.whole(Step, field, 1), oracle.whole(Step, field, 1)
        for name, a in mine.items():
            b = theirs.get(name)
            if a is None or b is None or a[0] <= 0.0 or b[0] <= 0.0:
                continue
            ratio = math.sqrt(a[0] / b[0])
            if difference(a, [ratio * x for x in b]) <= SAME * math.sqrt(a[0]):
                yield field, name, ratio

"""Where rounding alone makes the numbers of one process part from those of the ranks.

A ReLU, a maximum or a sign has another slope on each side of a kink. Where weights and loss agree
to rounding and yet the gradient jumps, a value has crossed one: no fault of the script, and nothing
after it can be compared with one process.
"""

import math
from dataclasses import replace

from ..evidence import Evidence
from ..tolerances import NONSMOOTH_STEP
from ..trace import Run, difference
from ..trace.events import Step
from .comparison import compare, incomparable, loss_apart, parted, update_apart
from .limits import limits

# The limits are those of the rule whose failure a kink would cause: one process, with what a team
# has widened (exam r9 hd_08_lora_ema).
RULE = "matches-single-process"


def before_the_kink(evidence: Evidence) -> Evidence:
    """The evidence with the run of one process up to the step before its first kink, if it has
    one.
    """
    step = _kink(evidence)
    if step is None or evidence.single is None:
        return evidence
    return replace(evidence.having("single", evidence.single.until(step - 1)), kink=step)


def _kink(evidence: Evidence) -> int | None:
    """The first step in which the gradient of one process jumps while its loss and the weights
    before agree, as DDP's all do.
    """
    run, single, ddp = evidence.full_precision, evidence.single, evidence.reference
    if run is None or single is None or ddp is None or not all(map(Run.steps, (run, single, ddp))):
        return None
    if incomparable(run, single, "single", "one process") or incomparable(
        run, ddp, "reference", "DDP"
    ):
        return None
    limit = limits(evidence, RULE)
    # A kink is no excuse unless DDP, on the same shards of the batch, agrees in every step (exam r9
    # hd_08_lora_ema).
    if limit.agree(compare(run, single).measures) or not limit.agree(compare(run, ddp).measures):
        return None
    allowed = limit.allowed
    for step in range(
        2, min(run.steps(), single.steps(), (parted(run, single) or run.steps() + 1) - 1) + 1
    ):
        jump = _gradient_apart(run, single, step)
        if jump > allowed["first gradient"]:
            alike = loss_apart(run, single, step) <= allowed["loss"] and limit.agree(
                compare(run, single, step - 1).measures
            )
            alike = alike and update_apart(run, single, step - 1)[0] <= allowed["update"]
            # A jump counts as a kink only if the loss and the weights before it agree to rounding
            # (exam r9 hd_08_lora_ema).
            return step if alike and jump < NONSMOOTH_STEP else None
    return None


def _gradient_apart(run: Run, single: Run, step: int) -> float:
    """Difference of the gradients of a step after backward, relative to the whole gradient."""
    mine, theirs = run.whole(Step, "grads", step), single.whole(Step, "grads", step)
    pairs = [(mine.get(name), grad) for name, grad in theirs.items()]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    size = math.sqrt(math.fsum(b[0] for _, b in known))
    return (
        math.sqrt(math.fsum(difference(a, b) ** 2 for a, b in known)) / size if size > 0.0 else 0.0
    )

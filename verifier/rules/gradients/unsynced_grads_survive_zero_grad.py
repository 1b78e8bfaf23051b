from ...trace import Trace
from ...trace.events import Discarded, Micro, Step, Zeroed
from ..base import Evidence, Finding, count, some
from ._base import UnreducedRule


class UnsyncedGradsSurviveZeroGrad(UnreducedRule):
    """`zero_grad` does not clear gradients that FSDP has not reduced yet.

    Why: backwards without sync accumulate in FSDP's unsharded parameters, which `zero_grad` does
    not reach. Those of an abandoned window (the epoch ends in it, a step is skipped, an error is
    caught) are added to the next window's.
    Wrong:
        for i, micro in enumerate(micros):
            last = (i + 1) % accumulation_steps == 0  # never true in a short last window
            model.set_requires_gradient_sync(last)
            loss_of(model, micro).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # clears nothing of the short window
    Right:
        for i, micro in enumerate(micros):
            last = (i + 1) % accumulation_steps == 0 or i + 1 == len(micros)
            model.set_requires_gradient_sync(last)
            loss_of(model, micro).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    Fix: Sync on the last micro-batch of the epoch too, or drop an incomplete window before its
    first backward. To abandon a window that has begun, also call `model.reset_iter_state()` (torch
    2.13), not only `zero_grad()`. Where another model's loss passes through these parameters,
    freeze them (`requires_grad_(False)`) instead.
    Source: measured (a relative error of 1.02 in the next gradient); the docstring of
    `FSDPModule.reset_iter_state`.
    """

    explains = ("double-or-missing-world-scale", "token-mean-of-means")

    def judge(self, evidence: Evidence) -> Finding:
        left = next(
            (left for trace in evidence.trained.traces if (left := _leaked(trace)) is not None),
            None,
        )
        if left is None:
            return self.passed("no `zero_grad` left unreduced gradients behind")
        names = f"{count(len(left.unsynced), 'parameter')} ({some(left.unsynced)})"
        text = (
            f"`zero_grad` before step {left.step} did not clear the unreduced gradients of {names}"
        )
        return self.failed(f"{text}: they are added to the next step's", left.at_line)


def _leaked(trace: Trace) -> Zeroed | None:
    """The first `zero_grad` that left unreduced gradients for a later step.

    What the optimizer of the step before it held unreduced already is the fault of that step, and
    of accum-never-resynced.
    """
    left: Zeroed | None = None
    known: set[str] = set()
    for record in trace.records:
        if isinstance(record, Step):
            if left is not None:
                return left
            # What the step's own optimizer held unreduced is accum-never-resynced's fault. A
            # discriminator's gradients that another loss leaves are this one's (fault
            # accum_never_resynced*.py; a critic's leftovers).
            known = set(record.unsynced) & set(record.held)
        elif isinstance(record, Micro):
            known = set()
        elif isinstance(record, Zeroed) and left is None and not known.issuperset(record.unsynced):
            left = record
        # Gradients that are thrown away before a step uses them did no harm (zoo/norm_guard.py).
        elif isinstance(record, Discarded):
            left = None
    return None

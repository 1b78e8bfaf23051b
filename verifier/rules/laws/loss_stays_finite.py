import math

from ...trace import Trace
from ...trace.events import Micro, Step
from ..base import Evidence, Finding, Rule, count


class LossStaysFinite(Rule):
    """The loss is a number in the last step of a run.

    Why: an exponential that overflows, a logarithm or a division of 0, or infinity times a mask of
    0 gives NaN, and one update by it makes every weight NaN. Nothing is raised: the script trains
    to its end, exits 0, and saves a model that answers NaN.
    Wrong:
        scores = torch.tensor([1.0, 200.0])
        mask = torch.tensor([1.0, 0.0])
        loss = (scores.exp() * mask).sum()  # infinity times 0
    Right:
        scores = torch.tensor([1.0, 200.0])
        mask = torch.tensor([1.0, 0.0])
        loss = (scores.masked_fill(mask == 0, 0.0).exp() * mask).sum()
    Fix: Find the first operation that gives it (`torch.autograd.set_detect_anomaly(True)`, or print
    the terms of the loss at that step), and mask or clamp what goes into it, not what comes out.
    Source: NVIDIA-NeMo/RL@7aa707177a (a KL term without a clamp); law L7: the loss of each step. A
    step that is left out for its NaN is no breach: the last ones count.
    """

    in_windows = True
    names_a_cause = False  # memory that nobody wrote, a cast, or a scaler may be it

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        first = min(filter(None, map(_since, run.traces)), default=0)
        if not first:
            return self.passed(f"the loss of {count(run.steps(), 'step')} is finite at the end")
        trace = next(trace for trace in run.traces if _since(trace) == first)
        micro = next(m for m in trace.of(Micro) if m.step == first and not _finite(m.loss))
        on = f" on rank {trace.rank}" if run.world_size > 1 else ""
        what = f"the loss{on} is {micro.loss} from step {first} to the last one"
        return self.failed(f"{what}: {_made_by(trace, first)}", micro.at_line)


def _since(trace: Trace) -> int:
    """The step from which on every step has a loss that is not finite; 0 if fewer than two have.

    One alone may be left out by a guard (zoo/norm_guard.py).
    """
    bad = {micro.step for micro in trace.of(Micro) if not _finite(micro.loss)}
    last = max((micro.step for micro in trace.of(Micro)), default=0)
    step = last
    while step in bad:
        step -= 1
    return step + 1 if step + 1 < last else 0


def _finite(loss: float | None) -> bool:
    return loss is None or math.isfinite(loss)


def _made_by(trace: Trace, step: int) -> str:
    """What makes it, as far as the records show it."""
    records = {record.step: record for record in trace.of(Step)}
    before, last = records.get(step), records.get(step - 1)
    if before is None or all(map(_known, before.weights.values())):
        return "the weights before it are finite, so its forward or its loss makes it"
    if last is None:
        return f"the weights are not finite before step {step}"
    gradients = [one for one in last.grads_at_step.values() if one is not None]
    if all(map(_known, gradients)):
        return f"the update of step {step - 1} makes the weights so, from finite gradients"
    return f"the gradients of step {step - 1} are not finite, and make the weights so"


def _known(sketch: list[float]) -> bool:
    return all(map(math.isfinite, sketch))

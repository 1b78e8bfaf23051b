import math
from collections.abc import Callable

from ...trace import Trace, difference
from ...trace.events import EditedGradients, KeptGradients, Leftover, Micro, Place, Step
from ..base import Evidence, Finding, Rule, Run, count, some


class GradientsConsumedOnce(Rule):
    """Every gradient is used by exactly one optimizer step, whole and unedited.

    Why: what the optimizer uses in a step must be the sum of what the backward passes since its
    last step produced. A gradient that is never cleared counts again in every later step; one that
    is cleared or clipped between two micro-batches of a step loses a part. DDP and one process do
    the same wrong sum, so that no comparison shows it.
    Wrong:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()  # the gradients of all earlier steps are still in .grad
    Right:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    Fix: Call `optimizer.zero_grad()` exactly once for each optimizer step: after `step()`, or
    before the first micro-batch. Clip once, after the last micro-batch and before `step()`.
    Source: law L1: at the first backward of each step the probe looks for gradients that the last
    step used, and between two backward passes for gradients that were changed.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        found = (case(self, run) for case in CASES)
        steps = count(run.steps(), "step")
        return next(filter(None, found), None) or self.passed(
            f"{steps}: gradients cleared once a step, unchanged between micro-batches"
        )


def _kept(rule: Rule, run: Run) -> Finding | None:
    """Gradients that a step used are there still when the next one begins."""
    kept = [
        (record, names)
        for trace in run.traces
        for record in trace.of(KeptGradients)
        if (names := _used_again(trace.of(Step), record))
    ]
    if not kept:
        return None
    first, names = kept[0]
    steps = count(len({record.step for record, _ in kept}), "step")
    what = f"step {first.step} begins with the gradients that step {first.step - 1} already used"
    text = f"{what}: {count(len(names), 'parameter')} ({some(names)}), in {steps}"
    return rule.failed(text, first.at_line)


def _of_another_loss(rule: Rule, run: Run) -> Finding | None:
    """An optimizer uses what the loss of another has left."""
    left = _left(run)
    if left is None:
        return None
    record, other = left
    which = f"{count(len(other.names), 'parameter')} ({some(other.names)})"
    place = f" at line {other.at_line.line}" if other.at_line is not None else ""
    text = (
        f"step {record.step} of an optimizer also uses gradients of {which} that another loss left"
        f" there: they were there when another optimizer stepped{place}; its first step had none"
    )
    fix = "Clear an optimizer's gradients right before its own backward."
    return rule.failed(text, record.at_line, fix=fix)


def _cleared(rule: Rule, run: Run) -> Finding | None:
    """Gradients are cleared between two micro-batches of a step."""
    lost = _lost(run)
    if lost is None:
        return None
    step, micros, line = lost
    text = (
        f"in each step gradients are cleared between micro-batches: step {step} throws away those"
        f" of {count(micros, 'micro-batch')} whose samples no later one has"
    )
    return rule.failed(text, line, fix="Clear gradients only between optimizer steps.")


def _clipped_early(rule: Rule, run: Run) -> Finding | None:
    """Gradients are scaled down before the last micro-batch of a step."""
    clips = [record for record in run.all(EditedGradients) if _scaled_down(record)]
    if not clips:
        return None
    clip = clips[0]
    factors = some([f"{factor:.4g}" for factor in clip.factors.values() if factor is not None])
    text = (
        f"step {clip.step}, before micro-batch {clip.micro}: the gradients accumulated so far were"
        f" scaled by {factors} ({some(clip.factors)})"
    )
    fix = "Clip or scale once, after the last micro-batch and before `step()`."
    return rule.failed(text, clip.at_line, fix=fix)


def _stepped_twice(rule: Rule, run: Run) -> Finding | None:
    """Two steps use the same gradients."""
    for twice in run.traces[0].steps:
        if _used_twice(run.traces[0], twice):
            text = (
                f"optimizer step {twice.step} uses the gradients of step {twice.step - 1} again: no"
                " backward ran in between"
            )
            fix = "Call `optimizer.step()` once for each set of gradients."
            return rule.failed(text, twice.at_line, fix=fix)
    return None


CASES: tuple[Callable[[Rule, Run], Finding | None], ...] = (
    _kept,
    _of_another_loss,
    _cleared,
    _clipped_early,
    _stepped_twice,
)


def _used_again(steps: list[Step], kept: KeptGradients) -> list[str]:
    """Of the gradients that were kept those that an optimizer uses in this step, too, and did not
    clear until then.
    """
    using = [record for record in steps if record.step == kept.step]
    # Gradients that another optimizer uses in a later step may wait: they were not consumed yet
    # (zoo/two_optimizers.py).
    return [name for name in kept.names if any(name in record.held for record in using)]


def _left(run: Run) -> tuple[Step, Leftover] | None:
    """The second step of an optimizer that uses, in every step but its first, what the loss of
    another has left in its gradients.
    """
    for trace in run.traces:
        found = {(record.optimizer, record.step): record for record in trace.of(Leftover)}
        for number in {number for number, _ in found}:
            own = [record for record in trace.of(Step) if record.optimizer == number]
            # Leftovers count if they are in every step but the first: nobody clears them. In the
            # first step too they are meant (losses added up), in some steps alone there is a reason
            # (exam round 5 q_08_gan_zero_grad: fault).
            if len(own) > 2 and [(number, r.step) in found for r in own] == [
                False,
                *[True] * (len(own) - 1),
            ]:
                return own[1], found[number, own[1].step]
    return None


def _lost(run: Run) -> tuple[int, int, Place | None] | None:
    """(step, how many, line) of micro-batches whose gradients never reach a step, if it is so in
    every step but the first.

    In the first a script may try itself. Where the same samples come again (SAM, gradient surgery),
    or the script puts the gradients together, none are lost.
    """
    for trace in run.traces:
        found = []
        # In the first step a script may try itself on a batch and throw the gradients away
        # (zoo/dry_run.py).
        for step in range(2, run.steps() + 1):
            micros = [record for record in trace.of(Micro) if record.step == step]
            last = trace.cleared(step)
            later = {row for micro in micros if micro.seq > last for row in micro.rows}
            gone = [
                micro
                for micro in micros
                # SAM and gradient surgery clear gradients of samples that come again in the same
                # step: nothing is lost where later micro-batches have the same samples
                # (test_laws.py (SAM); right scripts such as exam round 1 c_11_sam_closure).
                if micro.seq < last and micro.rows and not later.issuperset(micro.rows)
            ]
            # Where the optimizer finds gradients that are no multiple of the last backward's, the
            # script has put them together itself (surgery): those it cleared were kept elsewhere
            # (gradient surgery; right scripts such as exam round 1 b_08_pcgrad_dot)).
            assembled = any(_assembled(record) for record in trace.of(Step) if record.step == step)
            if gone and later and not assembled:
                found.append((step, len(gone), gone[0].at_line))
        # Gradients thrown away in some steps alone may be a decision (a skipped update); in every
        # step but the first they are a fault.
        if found and len(found) == run.steps() - 1:
            return found[0]
    return None


def _assembled(record: Step) -> bool:
    """Whether the optimizer finds other gradients than multiples of those that the last backward
    left.
    """
    before, after = record.after_backward or record.grads, record.grads_at_step
    pairs = [
        (a, b) for n, a in before.items() if a and (b := after.get(n)) and a[0] > 0.0 and b[0] > 0.0
    ]
    return any(
        # A clip or a division scales all elements alike, up to rounding (1e-6); a sum with other
        # gradients changes the direction by far more than 1e-3.
        difference(b, [math.sqrt(b[0] / a[0]) * x for x in a]) > 1e-3 * math.sqrt(b[0])
        for a, b in pairs
    )


def _scaled_down(edit: EditedGradients) -> bool:
    """Whether all gradients were scaled by one factor below 1, as a clip does it."""
    factors = [factor for factor in edit.factors.values() if factor is not None]
    return (
        len(factors) == len(edit.factors)
        and min(factors) > 0.0
        # A clip scales all gradients by one factor below 1 (0.1 % apart at most); per-parameter
        # factors are surgery or decay and stay unjudged (fault gradients_consumed_once_2.yaml (clip
        # between the backwards)).
        and max(factors) < min(1.0, 1.001 * min(factors))
    )


def _used_twice(trace: Trace, record: Step) -> bool:
    """Whether a step of an optimizer uses a gradient of its step before, and no backward ran
    since.
    """
    before = next(
        (r for r in trace.steps if r.step == record.step - 1 and r.optimizer == record.optimizer),
        None,
    )
    # Two optimizers of the last phase step after one backward: each uses its own parameters'
    # gradients once, so steps are compared by optimizer, and a backward between them counts (exam
    # round 12 nc_11_two_tower_phases).
    if before is None or any(before.seq < micro.seq < record.seq for micro in trace.of(Micro)):
        return False
    # A step records the gradients of all parameters: only those that this optimizer holds are used
    # by it (exam round 12 nc_11_two_tower_phases; peers in test_laws.py).
    known = {n: g for n, g in before.grads_at_step.items() if n in before.held}
    own = {n: g for n, g in record.grads_at_step.items() if n in record.held}
    # Gradients of zero are equal in every step of a frozen or unused part: using them twice changes
    # nothing (test_laws.py idle({'w': zeros})).
    return any(g and g[0] > 0.0 and g == known.get(n) for n, g in own.items())

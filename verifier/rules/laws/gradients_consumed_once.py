import math
from dataclasses import dataclass

from ...trace import Run, difference
from ...trace.events import Cleared, EditedGradients, KeptGradients, Micro, Place, Step
from ..base import Evidence, Finding, Rule, count, some


class GradientsConsumedOnce(Rule):
    """Every gradient is used by exactly one optimizer step, whole and unedited.

    Why: what the optimizer uses in a step must be the sum of what the backward passes since its last step produced.
    A gradient that is never cleared counts again in every later step; one that is cleared or clipped between two
    micro-batches of a step loses a part. DDP and one process do the same wrong sum, so that no comparison shows it.
    Wrong:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()  # the gradients of all earlier steps are still in .grad
    Right:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    Fix: Call `optimizer.zero_grad()` exactly once for each optimizer step: after `step()`, or before the first
    micro-batch. Clip once, after the last micro-batch and before `step()`.
    Source: law L1: at the first backward of each step the probe looks for gradients that the last step used, and
    between two backward passes for gradients that were changed.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        records = [(trace.rank, record) for trace in run.traces for record in trace.of(KeptGradients)]
        kept = [(r, names) for rank, r in records if (names := _used_again(run.traces[rank].of(Step), r))]
        if kept:
            first, names = kept[0]
            steps = len({record.step for record, _ in kept})
            return self.failed(
                f"step {first.step} begins with the gradients that step {first.step - 1} already used: "
                f"{count(len(names), 'parameter')} ({some(names)}), in {count(steps, 'step')}",
                first.at_line,
            )
        if lost := _lost(run):
            return self.failed(
                f"in each step gradients are cleared between micro-batches: step {lost.step} throws away those of "
                f"{count(lost.step_micros, 'micro-batch')} whose samples no later one has",
                lost.at_line,
                fix="Clear gradients only between optimizer steps.",
            )
        clips = [record for trace in run.traces for record in trace.of(EditedGradients) if _scaled_down(record)]
        if clips:
            factors = [f"{factor:.4g}" for factor in clips[0].factors.values() if factor is not None]
            return self.failed(
                f"step {clips[0].step}, before micro-batch {clips[0].micro}: the gradients accumulated so far were scaled by "
                f"{some(factors)} ({some(clips[0].factors)})",
                clips[0].at_line,
                fix="Clip or scale once, after the last micro-batch and before `step()`.",
            )
        twice = next(
            (r for r in run.traces[0].steps if _without_backward(run.traces[0].steps, r, run.micros(r.step)[0])), None
        )
        if twice is not None:
            return self.failed(
                f"optimizer step {twice.step} uses the gradients of step {twice.step - 1} again: no backward ran in between",
                twice.at_line,
                fix="Call `optimizer.step()` once for each set of gradients.",
            )
        return self.passed(
            f"{count(run.steps(), 'step')}: gradients cleared once a step, unchanged between micro-batches"
        )


def _used_again(steps: list[Step], kept: KeptGradients) -> list[str]:
    """Of the gradients that were kept those that an optimizer uses in this step, too, and did not clear until then."""
    using = [record for record in steps if record.step == kept.step]
    return [name for name in kept.names if any(name in record.held for record in using)]


@dataclass(frozen=True)
class _Lost:
    step: int
    step_micros: int
    at_line: Place | None


def _lost(run: Run) -> _Lost | None:
    """Micro-batches whose gradients never reach a step, if it is so in every step but the first, where a script may try itself.

    Where the same samples come again (SAM, gradient surgery), or the script puts the gradients together, none are lost.
    """
    for trace in run.traces:
        found = []
        for step in range(2, run.steps() + 1):
            micros = [record for record in trace.of(Micro) if record.step == step]
            edits = [r for r in trace.of(EditedGradients) if r.factors and set(r.factors.values()) == {0.0}]
            clears = [r.seq for r in trace.of(Cleared) if r.step == step] + [r.seq for r in edits if r.step == step]
            last = max(clears, default=0)
            later = {row for micro in micros if micro.seq > last for row in micro.rows}
            gone = [micro for micro in micros if micro.seq < last and micro.rows and not later.issuperset(micro.rows)]
            assembled = any(_assembled(record) for record in trace.of(Step) if record.step == step)
            if gone and later and not assembled:
                found.append(_Lost(step, len(gone), gone[0].at_line))
        if found and len(found) == run.steps() - 1:
            return found[0]
    return None


def _assembled(record: Step) -> bool:
    """Whether the optimizer finds other gradients than multiples of those that the last backward left."""
    pairs = [
        (a, b)
        for n, a in (record.after_backward or record.grads).items()
        if a and (b := record.grads_at_step.get(n)) and a[0] > 0.0 and b[0] > 0.0
    ]
    return any(difference(b, [math.sqrt(b[0] / a[0]) * x for x in a]) > 1e-3 * math.sqrt(b[0]) for a, b in pairs)


def _scaled_down(edit: EditedGradients) -> bool:
    """Whether all gradients were scaled by one factor below 1, as a clip does it."""
    factors = [factor for factor in edit.factors.values() if factor is not None]
    return len(factors) == len(edit.factors) and min(factors) > 0.0 and max(factors) < min(1.0, 1.001 * min(factors))


def _without_backward(steps: list[Step], record: Step, micros: object) -> bool:
    before = next((r for r in steps if r.step == record.step - 1 and r.optimizer == record.optimizer), None)
    same = before is not None and any(
        g and g[0] > 0.0 and g == before.grads_at_step.get(n) for n, g in record.grads_at_step.items()
    )
    return same and not micros

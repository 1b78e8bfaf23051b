from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import EditedGradients, KeptGradients, Step
from ..base import Rule


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
        kept = [(rank, r, names) for rank, r in records if (names := _used_again(run.traces[rank].of(Step), r))]
        if kept:
            rank, first, names = kept[0]
            steps = len({record.step for _, record, _ in kept})
            return self.failed(
                f"step {first.step} begins with the gradients that step {first.step - 1} already used: "
                f"{count(len(names), 'parameter')} ({some(names)}), in {count(steps, 'step')}",
                first.at_line,
            )
        edits = [(trace.rank, record) for trace in run.traces for record in trace.of(EditedGradients)]
        if edits:
            rank, edit = edits[0]
            factors = [factor for factor in edit.factors.values() if factor is not None]
            cleared = bool(factors) and max(factors) == 0.0
            how = "cleared" if cleared else "scaled by " + some([f"{f:.4g}" for f in factors]) if factors else "changed"
            fix = (
                "Clear gradients only between optimizer steps."
                if cleared
                else "Clip or scale once, after the last one."
            )
            return self.failed(
                f"step {edit.step}, before micro-batch {edit.micro}: the gradients accumulated so far were {how} "
                f"({some(edit.factors)}, rank {rank})",
                edit.at_line,
                fix=fix,
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


def _without_backward(steps: list[Step], record: Step, micros: object) -> bool:
    before = next((r for r in steps if r.step == record.step - 1 and r.optimizer == record.optimizer), None)
    same = before is not None and any(
        g and g[0] > 0.0 and g == before.grads_at_step.get(n) for n, g in record.grads_at_step.items()
    )
    return same and not micros

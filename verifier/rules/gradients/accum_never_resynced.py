from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks_gradients import never_on
from ...source.registry import detector
from ...trace.events import Step, Sync
from ..base import Rule
from ._sync import synced_always


class AccumNeverResynced(Rule):
    """At every optimizer step the gradients of all micro-batches have been reduced.

    Why: with `set_requires_gradient_sync(False)` FSDP keeps unreduced gradients aside. If the last micro-batch does
    not turn it on again, every sharded `.grad` is None and the step changes nothing; if only some backward is synced,
    the rest leaks into the next step.
    Wrong:
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros))  # never true: the last index is len - 1
            loss_of(model, micro).backward()
        optimizer.step()
    Right:
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            loss_of(model, micro).backward()
        optimizer.step()
    Fix: Set the flag before every micro-batch, to whether it is the last one of this step, and step only after a
    synced backward.
    Source: pytorch PR#118298 (review); FSDP2 has no `no_sync`, see `FSDPModule.set_requires_gradient_sync`.
    """

    def applies(self, evidence: Evidence) -> str:
        return synced_always(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        for record in (record for trace in run.traces for record in trace.of(Step)):
            # Other optimizers may step later, when the gradients of their own parameters have been reduced.
            lost = [name for name in record.unsynced if name in record.held]
            if lost and record.step <= run.steps():
                empty = [n for n in lost if record.grads_at_step.get(n) is None]
                state = "have no gradient at all" if empty else "lack that part of their gradient"
                return self.failed(
                    f"at step {record.step} FSDP still holds unreduced gradients of {count(len(lost), 'parameter')} "
                    f"({some(lost)}), which {state} in the optimizer",
                    evidence.line_of(run, Sync, last=True) or record.at_line,
                )
        flags = len(run.traces[0].of(Sync))
        return self.passed(f"no unreduced gradient at {count(run.steps(), 'step')} ({count(flags, 'sync flag')} seen)")


@detector("accum-never-resynced")
def never_resynced(flow: Flow) -> Iterator[Hit]:
    yield from never_on(flow, "set_requires_gradient_sync", "accum-never-resynced", "gradients are never reduced")
